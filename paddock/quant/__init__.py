"""W4A8 with QuaRot, and INT4-aware training.

quantize_layer.py  one layer into integers
calibrate.py  smoothing found by trial with the real quantizer, on a stream of text
compressed_tensors.py  quantized folders in the compressed-tensors format, written and read
quantized_layers.py  layers that compute with integers
measure.py    what quantization cost: nats, needles, divergence by position
qat.py        weights trained as the integers they will be exported as
settings.py   what is done to which weights
rotate.py     norms folded and the network turned, its function unchanged
run.py        a folder quantized layer by layer, resumable
calibration_data.py  text on its way through the layers, twice, on disk
w4a8.py       weights as integers: one function for training, scoring and export
layer_quantizer.py  the folder in which a quantized one is made
"""

from paddock.checkpoint import COMPRESSED_TENSORS, QUANTIZED_LOADERS
from paddock.quant.calibration_data import CalibrationText, TextPurpose
from paddock.quant.compressed_tensors import load_quantized
from paddock.quant.run import QuantizationProgress, check_not_quantized, quantize_folder
from paddock.quant.settings import RECIPES, QuantSettings

__all__ = [
    "RECIPES",
    "CalibrationText",
    "QuantSettings",
    "QuantizationProgress",
    "TextPurpose",
    "check_not_quantized",
    "quantize_folder",
]


QUANTIZED_LOADERS[COMPRESSED_TENSORS] = (
    load_quantized  # from here on, load_pretrained reads quantized folders
)
