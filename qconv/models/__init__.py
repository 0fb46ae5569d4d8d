"""Float networks. They know nothing of quantization: `qconv.convert` does that."""

from .activations import LearnedBias as LearnedBias, Maxout as Maxout, RPReLU as RPReLU
from .birealnet import BiRealNet as BiRealNet, birealnet18 as birealnet18, birealnet34 as birealnet34
from .by_name import (
    timm_model as timm_model,
    torchvision_mobilenet_v2 as torchvision_mobilenet_v2,
    torchvision_model as torchvision_model,
    torchvision_resnet as torchvision_resnet,
)
from .initial import he_normal_ as he_normal_
from .quicknet import (
    QuickNet as QuickNet,
    quicknet as quicknet,
    quicknet_large as quicknet_large,
    quicknet_small as quicknet_small,
)
from .reactnet import MobileReActNet as MobileReActNet, reactnet18 as reactnet18, reactnet_a as reactnet_a
from .resnet import (
    ResNet as ResNet,
    resnet18 as resnet18,
    resnet20 as resnet20,
    resnet32 as resnet32,
    resnet44 as resnet44,
    resnet56 as resnet56,
)
from .small_cnn import SmallCNN as SmallCNN, small_cnn as small_cnn
from .vgg import VGG as VGG, vgg7 as vgg7, vgg_small as vgg_small
