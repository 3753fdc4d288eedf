//! Decoders of PNG and JPEG files.

use std::io::Cursor;

use png::Transformations;
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;
use zune_jpeg::zune_core::colorspace::ColorSpace;
use zune_jpeg::zune_core::options::DecoderOptions;

use super::Pixels;

/// The most pixels along a side. A file of a few bytes can announce four thousand million.
const MAX_SIDE: usize = 16_384;
/// The most bytes of a decoded image.
const MAX_BYTES: usize = 512 << 20;

impl Pixels {
    pub(super) fn of_png(file: &[u8]) -> Result<Self, String> {
        let limits = png::Limits { bytes: MAX_BYTES };
        let mut decoder = png::Decoder::new_with_limits(Cursor::new(file), limits);
        decoder.set_transformations(Transformations::EXPAND);
        let mut reader = decoder.read_info().map_err(undecodable)?;
        let (kind, depth) = reader.output_color_type();
        let (width, height) = (reader.info().width as usize, reader.info().height as usize);
        let samples = kind.samples();
        bounded([height, width, samples * if depth == png::BitDepth::Sixteen { 2 } else { 1 }])?;
        let mut bytes = vec![0; reader.output_buffer_size().ok_or("is too large")?];
        reader.next_frame(&mut bytes).map_err(undecodable)?;
        if depth == png::BitDepth::Sixteen {
            let rounded =
                |&high_low: &[u8; 2]| ((u32::from(u16::from_be_bytes(high_low)) + 128) / 257) as u8;
            bytes = bytes.as_chunks().0.iter().map(rounded).collect();
        }
        let channels = if samples < 3 { 1 } else { 3 };
        if samples > channels {
            let opaque = bytes.chunks_exact(samples).flat_map(|pixel| &pixel[..channels]);
            bytes = opaque.copied().collect();
        }
        Ok(Self { bytes, size: [height, width, channels] })
    }

    pub(super) fn of_jpeg(file: &[u8]) -> Result<Self, String> {
        // Of a file with errors it shows what it can. `bounded` checks the size.
        let options = DecoderOptions::default()
            .set_strict_mode(false)
            .set_max_width(usize::MAX)
            .set_max_height(usize::MAX);
        let mut decoder = JpegDecoder::new_with_options(ZCursor::new(file), options);
        decoder.decode_headers().map_err(undecodable)?;
        let (width, height) = decoder.dimensions().ok_or("has no size")?;
        let is_gray = decoder.input_colorspace() == Some(ColorSpace::Luma);
        let (channels, space) = if is_gray { (1, ColorSpace::Luma) } else { (3, ColorSpace::RGB) };
        bounded([height, width, channels])?;
        decoder.set_options(options.jpeg_set_out_colorspace(space));
        let bytes = decoder.decode().map_err(undecodable)?;
        Ok(Self { bytes, size: [height, width, channels] })
    }
}

/// Errors if an image with this height, width and number of bytes for a pixel is too large to be decoded.
pub(super) fn bounded([height, width, pixel]: [usize; 3]) -> Result<(), String> {
    if height.max(width) > MAX_SIDE || height * width * pixel > MAX_BYTES {
        return Err(undecodable(format!("{width} x {height} pixels are too many")));
    }
    Ok(())
}

fn undecodable(error: impl std::fmt::Display) -> String {
    format!("cannot be decoded: {error}")
}
