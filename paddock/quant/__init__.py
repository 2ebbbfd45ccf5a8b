"""Post-training quantization to W4A8 with QuaRot rotation, and quantization-aware training.

calibrate.py  smoothing scales searched with the actual quantizer on calibration text
calibration_data.py  calibration text and the activations of each layer, on disk
compressed_tensors.py  reads and writes quantized checkpoints in the compressed-tensors format
layer_quantizer.py  the working folder of a quantization run, resumable and atomic
measure.py    quantization error: NLL, KL by position, needle recall
qat.py        quantization-aware training with straight-through rounding
quantize_layer.py  quantizes one decoder layer
quantized_layers.py  linear layers and experts that compute with integer weights
rotate.py     QuaRot: folds norms and rotates the residual stream, leaving the function unchanged
run.py        quantizes a checkpoint layer by layer, resumable
settings.py   quantization settings and named recipes
w4a8.py       integer weights and scales: one quantizer for training, scoring and export
"""

from paddock.checkpoint import COMPRESSED_TENSORS, QUANTIZED_LOADERS
from paddock.quant.calibration_data import CalibrationText, TextPurpose
from paddock.quant.compressed_tensors import load_quantized
from paddock.quant.qat import int4
from paddock.quant.rotate import rotate
from paddock.quant.run import QuantizationProgress, check_not_quantized, quantize_folder
from paddock.quant.settings import RECIPES, QuantSettings
from paddock.quant.w4a8 import QuantError, QuantizationArgs, QuantizedTensor, quantize

__all__ = [
    "RECIPES",
    "CalibrationText",
    "QuantError",
    "QuantSettings",
    "QuantizationArgs",
    "QuantizationProgress",
    "QuantizedTensor",
    "TextPurpose",
    "check_not_quantized",
    "int4",
    "load_quantized",
    "quantize",
    "quantize_folder",
    "rotate",
]

# Importing this package lets `load_pretrained` read quantized checkpoints.
QUANTIZED_LOADERS[COMPRESSED_TENSORS] = load_quantized
