//! An image as numbers: decoded, scaled, in color or in shades of gray.
//!
//! Input: the bytes of a PNG or JPEG file. Output: one byte for each channel of each pixel. This module opens no files.

#[cfg(feature = "images")]
mod decoders;

/// Pixels in rows, with 1 channel for shades of gray or 3 for colors (sRGB) side by side.
#[derive(Debug)]
pub(crate) struct Pixels {
    bytes: Vec<u8>,
    /// Height, width, channels.
    size: [usize; 3],
}

impl Pixels {
    /// Errors: this build decodes no images. The file is the subject of the error's sentence.
    #[cfg(not(feature = "images"))]
    pub(crate) fn decode(_: &[u8]) -> Result<Self, String> {
        Err("needs a build of paceline with its feature `images`".to_owned())
    }

    /// Decodes a file; its contents state its kind. Transparency is left out. The file is the subject of the error's sentence.
    #[cfg(feature = "images")]
    pub(crate) fn decode(file: &[u8]) -> Result<Self, String> {
        match file {
            [0x89, b'P', b'N', b'G', 0x0d, 0x0a, 0x1a, 0x0a, ..] => Self::of_png(file),
            [0xff, 0xd8, 0xff, ..] => Self::of_jpeg(file),
            _ => Err("does not begin as a PNG or JPEG file does".to_owned()),
        }
    }

    /// Height, width, and channels.
    pub(crate) fn size(&self) -> [usize; 3] {
        self.size
    }

    /// The bytes with this size, to which the image is scaled.
    pub(crate) fn of_size(self, [height, width, channels]: [usize; 3]) -> Vec<u8> {
        let [own_height, own_width, own_channels] = self.size;
        let mut bytes = self.bytes;
        if (own_height, own_width) != (height, width) {
            // Down the columns first, then along the rows.
            let row = own_width * own_channels;
            bytes = (scaled(&bytes, own_height, height, row).chunks_exact(row))
                .flat_map(|row| scaled(row, own_width, width, own_channels))
                .map(|value| value.round() as u8)
                .collect();
        }
        match (own_channels, channels) {
            (1, 3) => bytes.into_iter().flat_map(|shade| [shade; 3]).collect(),
            (3, 1) => bytes.as_chunks().0.iter().map(luma).collect(),
            _ => bytes,
        }
    }
}

/// The shade of a color, with the weights of ITU-R BT.709, as sRGB has them.
fn luma(&[red, green, blue]: &[u8; 3]) -> u8 {
    ((2126 * u32::from(red) + 7152 * u32::from(green) + 722 * u32::from(blue)) / 10_000) as u8
}

/// Scales `from` items of `elems` elements each to `to` items, with a triangle filter as wide as two items of the
/// coarser side, so that all items have a part in the result.
fn scaled<T: Copy + Into<f32>>(values: &[T], from: usize, to: usize, elems: usize) -> Vec<f32> {
    let ratio = from as f32 / to as f32;
    let reach = ratio.max(1.0);
    let mut all = vec![0.0; to * elems];
    for (at, sums) in all.chunks_exact_mut(elems).enumerate() {
        let center = (at as f32 + 0.5) * ratio;
        let first = ((center - reach).floor().max(0.0) as usize).min(from - 1);
        let end = ((center + reach).ceil() as usize).clamp(first + 1, from);
        let weight = |item: usize| (1.0 - ((item as f32 - (center - 0.5)) / reach).abs()).max(0.0);
        let total: f32 = (first..end).map(weight).sum();
        for item in first..end {
            let weight = weight(item) / total;
            let item = &values[item * elems..][..elems];
            sums.iter_mut().zip(item).for_each(|(sum, value)| *sum += weight * (*value).into());
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::decoders::bounded;
    use super::*;

    /// A file with these samples.
    fn png(color: png::ColorType, depth: png::BitDepth, size: [u32; 2], samples: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, size[1], size[0]);
        encoder.set_color(color);
        encoder.set_depth(depth);
        if color == png::ColorType::Indexed {
            encoder.set_palette(vec![1, 2, 3, 250, 251, 252]);
            encoder.set_trns(vec![9]);
        }
        encoder.write_header().unwrap().write_image_data(samples).unwrap();
        file
    }

    fn decoded(file: &[u8]) -> (Vec<u8>, [usize; 3]) {
        let pixels = Pixels::decode(file).unwrap();
        (pixels.bytes, pixels.size)
    }

    #[test]
    fn every_kind_of_png_becomes_bytes_of_one_or_three_channels() {
        use png::BitDepth::{Eight, One, Sixteen};
        use png::ColorType::{Grayscale, GrayscaleAlpha, Indexed, Rgb, Rgba};
        let of = |color, depth, size, samples: &[u8]| decoded(&png(color, depth, size, samples));
        assert_eq!(of(Grayscale, Eight, [1, 2], &[3, 200]), (vec![3, 200], [1, 2, 1]));
        assert_eq!(of(Grayscale, One, [1, 3], &[0b1010_0000]), (vec![255, 0, 255], [1, 3, 1]));
        // 65,535 is white, and 384 is one and a half of 257.
        assert_eq!(of(Grayscale, Sixteen, [1, 2], &[255, 255, 1, 128]), (vec![255, 1], [1, 2, 1]));
        assert_eq!(of(GrayscaleAlpha, Eight, [2, 1], &[7, 0, 9, 128]), (vec![7, 9], [2, 1, 1]));
        assert_eq!(of(Rgba, Eight, [1, 1], &[1, 2, 3, 4]), (vec![1, 2, 3], [1, 1, 3]));
        let wide = [1, 1, 2, 2, 3, 3, 4, 4];
        assert_eq!(of(Rgba, Sixteen, [1, 1], &wide), (vec![1, 2, 3], [1, 1, 3]));
        assert_eq!(of(Indexed, One, [1, 2], &[0b0100_0000]).0, [1, 2, 3, 250, 251, 252]);
        assert_eq!(of(Rgb, Eight, [1, 1], &[9, 8, 7]), (vec![9, 8, 7], [1, 1, 3]));
    }

    #[test]
    fn an_image_that_is_too_large_is_refused_before_its_pixels_are_there() {
        let mut long =
            png(png::ColorType::Grayscale, png::BitDepth::Eight, [1, 20_000], &[0; 20_000]);
        let refused = |file: &[u8]| Pixels::decode(file).map(|_| ()).unwrap_err();
        assert_eq!(refused(&long), "cannot be decoded: 20000 x 1 pixels are too many");
        long.truncate(60);
        assert_eq!(refused(&long), "cannot be decoded: 20000 x 1 pixels are too many");
        let mut jpeg = Vec::new();
        let encoder = jpeg_encoder::Encoder::new(&mut jpeg, 50);
        encoder.encode(&[0; 20_000], 20_000, 1, jpeg_encoder::ColorType::Luma).unwrap();
        assert_eq!(refused(&jpeg), "cannot be decoded: 20000 x 1 pixels are too many");
        let bytes = bounded([16_384, 16_384, 3]).unwrap_err();
        assert_eq!(bytes, "cannot be decoded: 16384 x 16384 pixels are too many");
        assert_eq!(bounded([16_384, 16_384, 2]), Ok(()));
    }

    #[test]
    fn a_jpeg_may_be_progressive_and_have_fewer_colors_than_pixels() {
        let pixels = [200, 30, 30].repeat(16 * 16);
        for is_progressive in [false, true] {
            let mut file = Vec::new();
            let mut encoder = jpeg_encoder::Encoder::new(&mut file, 100);
            encoder.set_progressive(is_progressive);
            encoder.set_sampling_factor(jpeg_encoder::SamplingFactor::F_2_2);
            encoder.encode(&pixels, 16, 16, jpeg_encoder::ColorType::Rgb).unwrap();
            let (decoded, size) = decoded(&file);
            assert_eq!((decoded.len(), size), (pixels.len(), [16, 16, 3]));
            assert!(decoded.iter().zip(&pixels).all(|(got, was)| got.abs_diff(*was) <= 2));
        }
    }

    #[test]
    fn colors_become_shades_and_shades_become_colors() {
        let colors = Pixels { bytes: vec![255, 0, 0, 10, 10, 10], size: [1, 2, 3] };
        assert_eq!(colors.of_size([1, 2, 1]), [54, 10]);
        let shades = Pixels { bytes: vec![5, 6], size: [2, 1, 1] };
        assert_eq!(shades.of_size([2, 1, 3]), [5, 5, 5, 6, 6, 6]);
    }

    /// The result of Pillow's `resize` with `Resampling.BILINEAR`: a filter of the same form.
    #[test]
    fn images_are_scaled_as_pillow_scales_them() {
        let of = |bytes: &[u8], size, to| Pixels { bytes: bytes.to_vec(), size }.of_size(to);
        // A flat image stays flat, also at its edges.
        assert_eq!(of(&[77; 35], [5, 7, 1], [3, 2, 1]), [77; 6]);
        assert_eq!(of(&[77; 6], [2, 3, 1], [5, 7, 1]), [77; 35]);
        // To twice and to half of the width.
        assert_eq!(of(&[0, 100], [1, 2, 1], [1, 4, 1]), [0, 25, 75, 100]);
        assert_eq!(of(&[0, 40, 80, 120], [1, 4, 1], [1, 2, 1]), [29, 91]);
        assert_eq!(of(&[0, 40, 80, 120], [4, 1, 1], [2, 1, 1]), [29, 91]);
        // Channels do not mix.
        assert_eq!(of(&[0, 9, 100, 9], [1, 2, 1], [1, 2, 1]), [0, 9, 100, 9]);
        let colors = [0, 9, 200, 100, 9, 0];
        assert_eq!(of(&colors, [1, 2, 3], [1, 1, 3]), [50, 9, 100]);
    }
}
