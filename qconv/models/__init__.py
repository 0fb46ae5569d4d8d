"""Float networks. They know nothing of quantization: `qconv.convert` does that."""

from .activations import LearnedBias as LearnedBias
from .activations import Maxout as Maxout
from .activations import RPReLU as RPReLU
from .birealnet import BiRealNet as BiRealNet
from .birealnet import birealnet18 as birealnet18
from .birealnet import birealnet34 as birealnet34
from .quicknet import QuickNet as QuickNet
from .quicknet import quicknet as quicknet
from .quicknet import quicknet_large as quicknet_large
from .quicknet import quicknet_small as quicknet_small
from .reactnet import MobileReActNet as MobileReActNet
from .reactnet import reactnet18 as reactnet18
from .reactnet import reactnet_a as reactnet_a
from .resnet import ResNet as ResNet
from .resnet import resnet18 as resnet18
from .resnet import resnet20 as resnet20
from .resnet import resnet32 as resnet32
from .resnet import resnet44 as resnet44
from .resnet import resnet56 as resnet56
from .small_cnn import SmallCNN as SmallCNN
from .small_cnn import small_cnn as small_cnn
from .torchvision_resnet import torchvision_resnet as torchvision_resnet
from .vgg import VGG as VGG
from .vgg import vgg7 as vgg7
from .vgg import vgg_small as vgg_small
