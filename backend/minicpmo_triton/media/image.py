"""Image file bytes -> RGB pixels, and in one go with :mod:`.slicing`, patches."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import Executor

import numpy as np
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from minicpmo_triton.errors import InvalidArgument
from minicpmo_triton.media.slicing import ImagePatches, Slicing

#: Longer side over shorter side. Beyond it a slice one patch high would be thousands of patches wide.
MAX_ASPECT_RATIO = 200

#: How often it is looked at which rows have been decoded, at most.
_NUM_LOOKS = 24

#: Reads that a file may take: so many, and one more for so many bytes. Pillow looks for markers byte by byte
#: and takes chunks of 0 bytes as they come, holding Python's lock: 128 MiB of those would take half a minute.
_FREE_READS, _BYTES_PER_READ = 100_000, 64

# Pillow's own limit is process-wide and lower than ours, which is held per image before decoding.
Image.MAX_IMAGE_PIXELS = None
Image.init()
_FORMATS = tuple(
    name for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF") if name in Image.OPEN
)

_EXIF_ORIENTATION = 0x0112
_ORIENTATION_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _WatchedFile(io.BytesIO):
    """Calls ``on_step`` every ``step`` bytes, before a read: a decoder reads when it has used what it had.

    What ``on_step`` raises is kept as ``failure``, and it is not called again: passing through the decoder it
    would look like a fault of the file. A file that is read in too many pieces raises OSError.
    """

    on_step: Callable[[], None] | None = None
    step = 0
    failure: Exception | None = None
    _next = 0

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left = _FREE_READS + len(data) // _BYTES_PER_READ

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise OSError("is made of too many small parts")
        if self.on_step is not None and self.tell() >= self._next:
            try:
                self.on_step()
            except Exception as error:
                self.failure, self.on_step = error, None
            self._next = self.tell() + self.step
        return super().read(size)


def decode_image(field: str, data: bytes, max_pixels: int) -> Image.Image:
    """Decode the first frame to RGB: EXIF orientation applied, transparency composed on white.

    Raises :class:`InvalidArgument` for ``field`` when ``data`` is no image of a supported format, is
    truncated or corrupt, has more than ``max_pixels`` (known from the header, before pixels are
    decoded) or is more than 200 times as long as wide.
    """
    image, orientation = _decode(field, data, max_pixels, lambda image, file: None)
    transpose = _ORIENTATION_TRANSPOSE.get(orientation)
    return image if transpose is None else image.transpose(transpose)


def _decode(
    field: str, data: bytes, max_pixels: int, on_open: Callable[[ImageFile, _WatchedFile], None]
) -> tuple[Image.Image, int]:
    """As :func:`decode_image`, not turned, and its orientation.

    ``on_open`` is called when the header has been read and is within the limits. What the file's ``on_step``
    raised is raised when the picture is there.
    """
    file = _WatchedFile(data)
    try:
        image = Image.open(file, formats=_FORMATS)
        _check_size(field, image.width, image.height, max_pixels)
        on_open(image, file)
        image.load()
        decoded = _to_rgb(field, image), _orientation(image)
    except (InvalidArgument, MemoryError):
        raise
    except UnidentifiedImageError:
        # Pillow's text names a BytesIO object, which tells a client nothing.
        raise InvalidArgument(
            field, f"is not an image of a supported format ({', '.join(_FORMATS)})"
        ) from None
    except Exception as error:  # Pillow's decoders raise nearly any type on corrupt input
        raise InvalidArgument(field, f"cannot be decoded: {error}") from error
    if file.failure is not None:
        raise file.failure
    return decoded


def _check_size(field: str, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise InvalidArgument(field, f"has {width}x{height} pixels; at most {max_pixels} are allowed")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidArgument(
            field, f"has {width}x{height} pixels; one side may be at most {MAX_ASPECT_RATIO} times the other"
        )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1 to 8. Broken metadata of a picture that decodes is not held against it."""
    try:
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
    except Exception:
        return 1
    return value if isinstance(value, int) and value in _ORIENTATION_TRANSPOSE else 1


def _to_rgb(field: str, image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Sixteen-bit grey (mode I: the same, in 32 bits): the high byte, as Pillow does for 16-bit RGB.
        grey = (np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8)
        return Image.fromarray(grey).convert("RGB")
    if image.mode == "F":
        raise InvalidArgument(field, "has floating-point pixels, which have no defined range")
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        if rgba.getchannel("A").getextrema() == (255, 255):
            return rgba.convert("RGB")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def decode_and_slice(
    field: str,
    data: bytes,
    max_pixels: int,
    max_slice_nums: int,
    scale_resolution: int = 448,
    pool: Executor | None = None,
) -> ImagePatches:
    """:func:`decode_image`, then ``slicing.slice_image``, which begins on ``pool`` while rows come."""
    begun: Slicing | None = None

    def begin(image: ImageFile, file: _WatchedFile) -> None:
        nonlocal begun
        if pool is not None and _comes_row_by_row(image):
            begun = Slicing(image, 1, max_slice_nums, scale_resolution, pool)
            file.step = max(len(data) // _NUM_LOOKS, 1024)
            # In blocks of Pillow's size: what is wrong behind the last row is seen only within its block,
            # and arithmetic coding takes a file in one.
            file.on_step = begun.take_decoded

    try:
        image, orientation = _decode(field, data, max_pixels, begin)
        if begun is not None and image is begun.image and orientation == 1:
            return begun.finish()
    except BaseException:
        if begun is not None:
            begun.cancel()
        raise
    if begun is not None:  # a PNG that is to be turned
        begun.cancel()
    return Slicing(image, orientation, max_slice_nums, scale_resolution, pool).finish()


def _comes_row_by_row(image: ImageFile) -> bool:
    """Whether the rows of an opened picture are final, upright and RGB as soon as they are decoded."""
    if image.mode != "RGB" or "transparency" in image.info:
        return False
    if isinstance(image, PngImageFile):  # whose orientation may stand behind the pixels
        return not image.info.get("interlace")
    return isinstance(image, JpegImageFile) and _orientation(image) == 1
