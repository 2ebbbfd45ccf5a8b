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

from paddock.checkpoint.config_common import COMPRESSED_TENSORS
from paddock.checkpoint.load import QUANTIZED_LOADERS
from paddock.quant.calibration_data import CalibrationText
from paddock.quant.compressed_tensors import load_quantized
from paddock.quant.rotate import rotate
from paddock.quant.run import quantize_folder
from paddock.quant.settings import RECIPES, QuantSettings
from paddock.quant.w4a8 import QuantError, QuantizationArgs, QuantizedTensor, quantize

QUANTIZED_LOADERS[COMPRESSED_TENSORS] = (
    load_quantized  # from here on, load_pretrained reads quantized folders
)

__all__ = [
    "RECIPES",
    "CalibrationText",
    "QuantError",
    "QuantSettings",
    "QuantizationArgs",
    "QuantizedTensor",
    "load_quantized",
    "quantize",
    "quantize_folder",
    "rotate",
]
