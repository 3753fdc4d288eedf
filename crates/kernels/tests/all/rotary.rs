//! Rotary tables against values of the published formulas.

use paceline_kernels::Compute;
use paceline_kernels::rotary::{Llama3Scaling, RotaryConfig, RotaryScaling, RotaryTable};
use paceline_memory::{Allocator, DType};

const PLAIN: RotaryConfig = RotaryConfig { head_dim: 8, theta: 10_000.0, scaling: None };

fn assert_frequencies(config: RotaryConfig, want: [f64; 4]) {
    let got = config.frequencies().unwrap();
    assert_eq!(got.len(), 4);
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 1e-10 * want, "{config:?}: {got}, not {want}");
    }
}

#[test]
fn frequencies_are_those_of_the_formulas() {
    // 10000^(-2 j / 8) is 10^-j.
    assert_frequencies(PLAIN, [1.0, 0.1, 0.01, 0.001]);
    let linear = Some(RotaryScaling::Linear { factor: 4.0 });
    assert_frequencies(RotaryConfig { scaling: linear, ..PLAIN }, [0.25, 0.025, 0.0025, 0.00025]);
    // Wavelengths are 2 pi 10^j: 6.3, 63, 628 and 6283. Those below 1000 / 4 are kept, those above 1000 / 1 are divided
    // by 8. The third turns 10 / (2 pi) = 1.5915494309 times in 1000 positions, so s = 0.5915494309 / 3 = 0.1971831436
    // and its frequency is 0.01 ((1 - s) / 8 + s) = 0.01 (0.1003521070 + 0.1971831436).
    let llama3 = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 1000,
    };
    let scaling = Some(RotaryScaling::Llama3(llama3));
    assert_frequencies(
        RotaryConfig { scaling, ..PLAIN },
        [1.0, 0.1, 0.002_975_352_506_6, 0.000_125],
    );
}

/// Llama 3.1 8B: base 500000, heads of 128 elements, factor 8 over 8192 positions.
#[test]
fn llama_3_1_keeps_high_frequencies_and_divides_low_ones() {
    let scaling = Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    };
    let plain = RotaryConfig { head_dim: 128, theta: 500_000.0, scaling: None };
    let scaled = RotaryConfig { scaling: Some(RotaryScaling::Llama3(scaling)), ..plain };
    let (plain, scaled) = (plain.frequencies().unwrap(), scaled.frequencies().unwrap());
    let ratios: Vec<f64> =
        scaled.iter().zip(&plain).map(|(scaled, plain)| scaled / plain).collect();
    // Wavelength 2 pi 500000^(j / 64) passes 2048 between j = 28 (1956) and 29 (2401), and 8192 between 34 (6696)
    // and 35 (8218).
    assert!(ratios[..29].iter().all(|ratio| *ratio == 1.0), "{ratios:?}");
    assert!(ratios[29..35].iter().all(|ratio| *ratio < 1.0 && *ratio > 0.125), "{ratios:?}");
    assert!(ratios[35..].iter().all(|ratio| *ratio == 0.125), "{ratios:?}");
    assert!(ratios.is_sorted_by(|a, b| a >= b), "{ratios:?}");
}

#[test]
fn tables_have_the_cosines_and_sines_of_all_positions() {
    let allocator = Allocator::new();
    let single = RotaryTable::new(&allocator, PLAIN, 3000, DType::F32).unwrap();
    let double = RotaryTable::new(&allocator, PLAIN, 3000, DType::F64).unwrap();
    assert_eq!((single.max_len(), single.values().dims()), (3000, [3000, 8].as_slice()));
    let (singles, doubles) =
        (single.values().read::<f32>().unwrap(), double.values().read::<f64>().unwrap());
    for position in 0..3000 {
        for (pair, frequency) in [1.0, 0.1, 0.01, 0.001].into_iter().enumerate() {
            let angle = position as f64 * frequency;
            for (at, want) in [(pair, angle.cos()), (4 + pair, angle.sin())] {
                let at = position * 8 + at;
                // An angle of up to 3000 is rounded to 2^-42.
                assert!((doubles[at] - want).abs() < 1e-12, "{position} {pair}");
                // Half of the distance of the numbers of f32 below one.
                assert!((f64::from(singles[at]) - want).abs() < 6e-8, "{position} {pair}");
            }
        }
    }
}

#[test]
fn mistakes_are_errors() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let of = |config: RotaryConfig, dtype| {
        RotaryTable::new(&compute.allocator, config, 4, dtype).map_err(|e| e.to_string())
    };
    let error = of(RotaryConfig { head_dim: 7, ..PLAIN }, DType::F32).unwrap_err();
    assert_eq!(error, "rotary: head_dim must be even and not zero, got 7");
    let error = of(RotaryConfig { theta: f64::NAN, ..PLAIN }, DType::F32).unwrap_err();
    assert_eq!(error, "rotary: theta must be positive, got NaN");
    let scaling = Some(RotaryScaling::Linear { factor: 0.0 });
    let error = of(RotaryConfig { scaling, ..PLAIN }, DType::F32).unwrap_err();
    assert_eq!(error, "rotary: factor must be positive, got 0");
    let scaling = Some(RotaryScaling::Llama3(Llama3Scaling {
        factor: 8.0,
        low_freq_factor: 4.0,
        high_freq_factor: 4.0,
        original_max_position: 1000,
    }));
    let error = of(RotaryConfig { scaling, ..PLAIN }, DType::F32).unwrap_err();
    assert!(error.contains("high_freq_factor must be larger than low_freq_factor"), "{error}");
    assert!(of(PLAIN, DType::BF16).unwrap_err().contains("bf16"));
}
