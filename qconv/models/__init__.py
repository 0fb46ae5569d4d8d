"""Float networks. They know nothing of quantization: `qconv.convert` does that."""

from .resnet import ResNet as ResNet
from .resnet import resnet18 as resnet18
from .resnet import resnet20 as resnet20
from .small_cnn import SmallCNN as SmallCNN
from .small_cnn import small_cnn as small_cnn
