"""Images to train on, as LightningDataModules.

The contract of a data module, which is all that training asks of it:

- attributes `num_classes`, `in_channels` and `image_size` (height, width), known before `setup`;
- if it is to be known what images and outputs mean: `normalize`, mean and deviation, from `setup` on, which keeps
  what was set before it; and `classes`, their names;
- `train_dataloader`, `val_dataloader` and `test_dataloader` give batches `(images, labels)`: float `(N, C, H, W)` and
  int64 `(N,)`; those of large images are uint8, with the files that could not be read, until Lightning's hooks
  `on_before_batch_transfer` and `on_after_batch_transfer` make them so. Validation comes from the train split, never
  from the test split;
- the order of the images and their augmentation are a function of (seed, epoch) alone, so a resumed run sees what an
  uninterrupted one would have seen; under DDP the ranks share each epoch without loss or repetition. Lightning says
  which epoch it is; your own loop has to (`loader.sampler.set_epoch`).

`PicturesDataModule` gives the last two points to every data set that fits into memory.
"""

from ..images import Normalize as Normalize
from .augment import (
    Augment as Augment,
    Cutout as Cutout,
    PerImage as PerImage,
    RandomCrop as RandomCrop,
    RandomFlip as RandomFlip,
)
from .cifar import CIFARDataModule as CIFARDataModule
from .digits import DigitsDataModule as DigitsDataModule
from .image_folder import BrokenPictureError as BrokenPictureError, ImageFolderDataModule as ImageFolderDataModule
from .imagenet import ImageNetDataModule as ImageNetDataModule
from .loader import EpochOrder as EpochOrder, TensorLoader as TensorLoader
from .pictures import Pictures as Pictures, PicturesDataModule as PicturesDataModule
from .prepare import prepare_pictures as prepare_pictures
from .prepared import PreparedDataModule as PreparedDataModule
from .progressive import ProgressiveSize as ProgressiveSize
from .shard_index import ShardError as ShardError
from .shards import WebDatasetDataModule as WebDatasetDataModule
