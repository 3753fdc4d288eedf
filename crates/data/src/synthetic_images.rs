//! Synthetic images: a classification problem that a small network can learn, without any file.
//!
//! Input: sizes and a seed. Output: the same images on every machine. This module knows no network.

use rand::RngExt;

use crate::arrays::reserved;
use crate::random::{RandomPurpose, fill_normal, generator};
use crate::{DataError, Dataset, Field, Sample, Split};

/// Side of the grid of random values between which a template is interpolated.
const GRID: usize = 4;
/// Root mean square of the template's part of a pixel; that of the normal noise is 1. With this value, a
/// network of two convolutions (16 and 32 channels) classifies all of 2000 test images of 28 x 28 or
/// 32 x 32 x 3 correctly after 200 steps of batch 128 at a learning rate of 0.01.
const SIGNAL: f32 = 0.5;
/// The smallest amplitude, for images with so few pixels that noise would hide [`SIGNAL`].
const MIN_AMPLITUDE: f32 = 8.0;
/// Standard deviation of the noise in the scores that decide the label.
const LABEL_NOISE: f32 = 0.5;

/// The size and seed of [`SyntheticImages`].
#[derive(Clone, Debug)]
pub struct SyntheticImagesConfig {
    /// Rows of an image.
    pub height: usize,
    /// Columns of an image.
    pub width: usize,
    /// Values per pixel.
    pub channels: usize,
    /// Number of classes.
    pub num_classes: usize,
    /// Number of images.
    pub len: usize,
    /// Determines all random numbers.
    pub seed: u64,
    /// The split. Both splits of a seed have the same classes and share no image.
    pub split: Split,
}

/// Images whose label follows from a hidden linear map: the target is computed from X.w* + noise.
///
/// w* has one column per class: a smooth pattern of norm 1, the template of the class. An image X is standard
/// normal noise plus a multiple of the template of a class that is drawn uniformly. Its label is
/// `argmax_k(X . w*_k + noise_k)`. The templates vary slowly over the image, so that pooling does not erase
/// them, and are strong enough for a small convolutional network to learn them within a few hundred steps of plain SGD.
/// plain SGD.
///
/// They are made once and kept as f32, so that reading is a copy; or each is made when it is read, with the same bits.
#[derive(Debug)]
pub struct SyntheticImages {
    config: SyntheticImagesConfig,
    templates: Vec<Vec<f32>>,
    stored: Option<StoredImages>,
}

#[derive(Debug)]
struct StoredImages {
    images: Vec<f32>, // (len, height, width, channels)
    labels: Vec<i64>, // (len)
}

impl SyntheticImages {
    /// Makes the images. Errors if an extent is zero, or if memory does not suffice.
    pub fn new(config: SyntheticImagesConfig) -> Result<Self, DataError> {
        let mut made = Self::on_demand(config)?;
        let (len, image_elems) = (made.config.len, made.image_elems());
        let mut images = reserved(len as u128 * image_elems as u128)?;
        images.resize(len * image_elems, 0.0);
        let each = images.chunks_exact_mut(image_elems).enumerate();
        let labels = each.map(|(index, image)| made.make(index, image)).collect();
        made.stored = Some(StoredImages { images, labels });
        Ok(made)
    }

    /// Makes each image when it is read. Errors if an extent is zero, or if memory does not suffice for an
    /// image of each class.
    pub fn on_demand(config: SyntheticImagesConfig) -> Result<Self, DataError> {
        let SyntheticImagesConfig { height, width, channels, num_classes, len, .. } = config;
        DataError::at_least_one("the height", height)?;
        DataError::at_least_one("the width", width)?;
        DataError::at_least_one("the number of channels", channels)?;
        DataError::at_least_one("the number of classes", num_classes)?;
        DataError::at_least_one("the number of samples", len)?;
        let extents = [height, width, channels, num_classes];
        let num_elems = extents.iter().fold(1u128, |n, &x| n.saturating_mul(x as u128));
        reserved::<f32>(num_elems)?;
        let templates = templates([height, width, channels], num_classes, config.seed);
        Ok(Self { config, templates, stored: None })
    }

    /// Makes an image, and returns its label.
    fn make(&self, index: usize, image: &mut [f32]) -> i64 {
        let Self { config, templates, .. } = self;
        let purpose = match config.split {
            Split::Train => RandomPurpose::TrainImages,
            Split::Test => RandomPurpose::TestImages,
        };
        let amplitude = (SIGNAL * (image.len() as f32).sqrt()).max(MIN_AMPLITUDE);
        let mut generator = generator(config.seed, purpose, 0, index as u64);
        let drawn = generator.random_range(0..config.num_classes);
        fill_normal(&mut generator, image);
        for (value, pattern) in image.iter_mut().zip(&templates[drawn]) {
            *value += amplitude * pattern;
        }
        let mut noise = vec![0.0; config.num_classes];
        fill_normal(&mut generator, &mut noise);
        let scores = templates.iter().zip(noise).map(|(t, n)| dot(image, t) + LABEL_NOISE * n);
        argmax(scores) as i64
    }

    fn image_elems(&self) -> usize {
        self.config.height * self.config.width * self.config.channels
    }
}

impl Dataset for SyntheticImages {
    fn len(&self) -> usize {
        self.config.len
    }

    fn fields(&self) -> Vec<Field> {
        let SyntheticImagesConfig { height, width, channels, num_classes, .. } = self.config;
        vec![Field::f32("inputs", [height, width, channels]), Field::class(num_classes)]
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let input = sample.f32("inputs");
        let class = match &self.stored {
            Some(StoredImages { images, labels }) => {
                let image_elems = input.len();
                input.copy_from_slice(&images[index * image_elems..][..image_elems]);
                labels[index]
            }
            None => self.make(index, input),
        };
        sample.set_class(class);
    }
}

/// One pattern per class, each (height, width, channels) and of norm 1: normal values on a coarse grid, with
/// bilinear interpolation. They depend on the seed and the shape, not on the split.
fn templates(shape: [usize; 3], num_classes: usize, seed: u64) -> Vec<Vec<f32>> {
    let [height, width, channels] = shape;
    let template = |class| {
        let mut grid = vec![0.0; GRID * GRID * channels]; // (GRID, GRID, channels)
        fill_normal(&mut generator(seed, RandomPurpose::Templates, 0, class), &mut grid);
        let mut pattern = Vec::with_capacity(height * width * channels);
        for y in 0..height {
            let (top, down) = on_grid(y, height);
            for x in 0..width {
                let (left, right) = on_grid(x, width);
                for channel in 0..channels {
                    let at = |row, column| grid[(row * GRID + column) * channels + channel];
                    let upper = lerp(at(top, left), at(top, left + 1), right);
                    let lower = lerp(at(top + 1, left), at(top + 1, left + 1), right);
                    pattern.push(lerp(upper, lower, down));
                }
            }
        }
        let norm = dot(&pattern, &pattern).sqrt();
        pattern.iter_mut().for_each(|value| *value /= norm);
        pattern
    };
    (0..num_classes as u64).map(template).collect()
}

/// Where position `at` of `extent` lies on the grid: the grid line before it (never the last line), and the fraction of the
/// way to the next line.
fn on_grid(at: usize, extent: usize) -> (usize, f32) {
    let position = (at * (GRID - 1)) as f32 / extent.saturating_sub(1).max(1) as f32;
    let line = (position as usize).min(GRID - 2);
    (line, position - line as f32)
}

fn lerp(from: f32, to: f32, share: f32) -> f32 {
    from + (to - from) * share
}

/// Inner product, summed in eight lanes so that it can be vectorized in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_lanes, a_rest) = a.as_chunks::<8>();
    let (b_lanes, b_rest) = b.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for (a, b) in a_lanes.iter().zip(b_lanes) {
        for i in 0..8 {
            lanes[i] += a[i] * b[i];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}

/// Index of the first largest score.
fn argmax(scores: impl Iterator<Item = f32>) -> usize {
    let first = (0, f32::NEG_INFINITY);
    scores.enumerate().fold(first, |best, new| if new.1 > best.1 { new } else { best }).0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OwnedSample;

    fn images(height: usize, width: usize, channels: usize, split: Split) -> SyntheticImages {
        let (num_classes, len, seed) = (10, 1000, 42);
        let config =
            SyntheticImagesConfig { height, width, channels, num_classes, len, seed, split };
        SyntheticImages::new(config).unwrap()
    }

    fn stored(data: &SyntheticImages) -> &StoredImages {
        data.stored.as_ref().unwrap()
    }

    /// The fraction of samples whose label is the class of the most similar template.
    fn accuracy(data: &SyntheticImages, templates: &[Vec<f32>]) -> f64 {
        let elems = templates[0].len();
        let guess = |image: &[f32]| argmax(templates.iter().map(|t| dot(image, t))) as i64;
        let StoredImages { images, labels } = stored(data);
        let guesses = images.chunks_exact(elems).map(guess);
        let right = guesses.zip(labels).filter(|(guess, label)| guess == *label).count();
        right as f64 / labels.len() as f64
    }

    #[test]
    fn the_nearest_template_names_the_class() {
        for (h, w, c) in [(28, 28, 1), (32, 32, 3), (7, 13, 2)] {
            let templates = templates([h, w, c], 10, 42);
            for split in [Split::Train, Split::Test] {
                let accuracy = accuracy(&images(h, w, c, split), &templates);
                assert!(accuracy >= 0.99, "{h} x {w} x {c}, {split:?}: {accuracy}");
            }
        }
    }

    #[test]
    fn what_is_learned_from_the_train_split_holds_for_the_test_split() {
        let (train, test) = (images(28, 28, 1, Split::Train), images(28, 28, 1, Split::Test));
        let mut means = vec![vec![0.0; 784]; 10];
        let StoredImages { images, labels } = stored(&train);
        for (image, &label) in images.chunks_exact(784).zip(labels) {
            for (mean, value) in means[label as usize].iter_mut().zip(image) {
                *mean += value;
            }
        }
        for mean in &mut means {
            let norm = dot(mean, mean).sqrt();
            mean.iter_mut().for_each(|value| *value /= norm);
        }
        assert!(accuracy(&test, &means) >= 0.99);
        assert!(images.chunks_exact(784).all(|image| image != &stored(&test).images[..784]));
    }

    #[test]
    fn every_class_occurs_about_equally_often() {
        let data = images(28, 28, 1, Split::Train);
        for class in 0..10 {
            let count = stored(&data).labels.iter().filter(|&&label| label == class).count();
            // The expected count is 100, with a standard deviation of 9.5. The seed is fixed.
            assert!((60..=140).contains(&count), "class {class}: {count}");
        }
    }

    #[test]
    fn the_seed_decides_and_a_longer_set_begins_like_a_shorter_one() {
        let make = |seed, len| {
            let (height, width, channels, num_classes, split) = (5, 3, 1, 4, Split::Train);
            let config =
                SyntheticImagesConfig { height, width, channels, num_classes, len, seed, split };
            SyntheticImages::new(config).unwrap()
        };
        let (short, long, other) = (make(1, 10), make(1, 20), make(2, 10));
        assert_eq!(stored(&short).images, stored(&long).images[..150]);
        assert_eq!(stored(&short).labels, stored(&long).labels[..10]);
        assert_ne!(stored(&short).images, stored(&other).images);
    }

    #[test]
    fn images_made_on_demand_are_those_that_are_kept() {
        let kept = images(7, 13, 2, Split::Test);
        let on_demand = SyntheticImages::on_demand(kept.config.clone()).unwrap();
        for index in [999, 0, 500] {
            let [a, b] = [&kept, &on_demand].map(|data| {
                let mut sample = OwnedSample::read(data, 0, index).unwrap();
                (sample.f32("inputs"), sample.i64("targets"))
            });
            assert_eq!(a, b);
        }
    }

    #[test]
    fn a_single_pixel_still_works() {
        assert_eq!(images(1, 1, 1, Split::Train).len(), 1000);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        let make = |height, len| {
            let (width, channels, num_classes, seed, split) = (8, 1, 10, 0, Split::Train);
            let config =
                SyntheticImagesConfig { height, width, channels, num_classes, len, seed, split };
            SyntheticImages::new(config).unwrap_err().to_string()
        };
        assert_eq!(make(0, 1), "the height must be at least 1, got 0");
        assert_eq!(make(1, 0), "the number of samples must be at least 1, got 0");
        assert!(make(usize::MAX, usize::MAX).starts_with("out of memory"));
    }
}
