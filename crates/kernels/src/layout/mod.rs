//! How the images of a batch lie in memory, and the conversion between the two layouts.
//!
//! The operations on images read and write either layout. Both layouts give the same bits, because each sum has the same
//! order of terms.

pub(crate) mod convert;
pub(crate) mod square;

pub use convert::convert;

/// The order of the extents of a batch of images in memory, outermost first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageLayout {
    /// (batch, height, width, channels): the channels of a position lie next to each other.
    #[default]
    Nhwc,
    /// (batch, channels, height, width): each channel of an image is a plane.
    Nchw,
}

impl ImageLayout {
    /// Both layouts.
    pub const ALL: [Self; 2] = [ImageLayout::Nhwc, ImageLayout::Nchw];

    /// The name, as users write it.
    pub fn name(self) -> &'static str {
        match self {
            ImageLayout::Nhwc => "nhwc",
            ImageLayout::Nchw => "nchw",
        }
    }

    /// The shape of a batch of images of (height, width, channels).
    pub fn shape(self, batch: usize, [height, width, channels]: [usize; 3]) -> [usize; 4] {
        match self {
            ImageLayout::Nhwc => [batch, height, width, channels],
            ImageLayout::Nchw => [batch, channels, height, width],
        }
    }

    /// Elements from one row of an image of (height, width, channels) to the next, from one position of a row to the next,
    /// and from one channel to the next.
    pub(crate) fn strides(self, [height, width, channels]: [usize; 3]) -> [usize; 3] {
        match self {
            ImageLayout::Nhwc => [width * channels, channels, 1],
            ImageLayout::Nchw => [width, 1, height * width],
        }
    }

    /// The channel of element `at` of a batch of images of (height, width, channels).
    pub(crate) fn channel(self, [height, width, channels]: [usize; 3], at: usize) -> usize {
        match self {
            ImageLayout::Nhwc => at % channels,
            ImageLayout::Nchw => at / (height * width) % channels,
        }
    }
}
