//! The sums of losses: they stay in a tensor, and batches add up in it.

use crate::common::of;
use paceline_kernels::{Compute, KernelError, loss};
use paceline_memory::{Allocator, Tensor};

const CLASSES: usize = 5;

fn sums(begin: [f64; 3]) -> Tensor {
    of(&begin, [3])
}

fn read(sums: &Tensor) -> [u64; 3] {
    let sums = sums.read::<f64>().unwrap();
    std::array::from_fn(|at| sums[at].to_bits())
}

/// Numbers whose sums depend on the order of addition.
fn numbers(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|at| ((at * 37 + seed * 11) % 101) as f32 / 7.0 - 6.0).collect()
}

/// The logits and labels of a batch.
fn batch(rows: usize, seed: usize) -> [Tensor; 2] {
    let labels: Vec<i64> = (0..rows).map(|row| ((row + seed) % CLASSES) as i64).collect();
    let logits = of(&numbers(rows * CLASSES, seed), [rows, CLASSES]);
    [logits, of(&labels, [rows])]
}

/// The batches one after the other in one tensor, and each in a tensor of its own, added up on the host.
fn add_up(compute: &Compute, run: impl Fn(&Compute, usize, &Tensor)) -> ([u64; 3], [u64; 3]) {
    let together = sums([0.0; 3]);
    let mut apart = [0.0f64; 3];
    for seed in 0..6 {
        run(compute, seed, &together);
        let own = sums([0.0; 3]);
        run(compute, seed, &own);
        for (sum, x) in apart.iter_mut().zip(own.read::<f64>().unwrap().iter()) {
            *sum += *x;
        }
    }
    (read(&together), apart.map(f64::to_bits))
}

#[test]
fn each_batch_is_summed_first_and_added_once() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    // The third batch is empty, as on a rank without samples.
    let rows = |seed: usize| if seed == 2 { 0 } else { 7 + seed };
    let (together, apart) = add_up(&compute, |compute, seed, sums| {
        let [logits, labels] = batch(rows(seed), seed);
        loss::cross_entropy(compute, &logits, &labels, 1.0, None, sums).unwrap();
    });
    assert_eq!(together, apart);
    assert_eq!(f64::from_bits(together[2]), (7 + 8 + 10 + 11 + 12) as f64);
    let (together, apart) = add_up(&compute, |compute, seed, sums| {
        let shape = [rows(seed), CLASSES];
        let random = |seed| of(&numbers(shape[0] * CLASSES, seed), shape);
        loss::mse(compute, &random(seed), &random(seed + 50), 1.0, None, sums).unwrap();
    });
    assert_eq!(together, apart);
    assert_eq!([together[1], together[2]].map(f64::from_bits), [0.0, 48.0]);
}

#[test]
fn the_three_sums() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let logits = of(&[0.0, 0.0, 3.0, 1.0], [2, 2]);
    let labels = of(&[0i64, 1], [2]);
    let sums_of_both = sums([1.0, 10.0, 100.0]);
    loss::cross_entropy(&compute, &logits, &labels, 1.0, None, &sums_of_both).unwrap();
    // ln 2 for the first row, of which both classes are equal, and ln(1 + e^2) for the second one, which is wrong.
    let expected = 1.0 + 2f64.ln() + (1.0 + 2f64.exp()).ln();
    let found = sums_of_both.read::<f64>().unwrap();
    // Four operations, each with a relative error of 1.1e-16 at most.
    assert!((found[0] - expected).abs() < 1e-14, "{} and {expected}", found[0]);
    assert_eq!(found[1..], [11.0, 102.0]);
}

#[test]
fn sums_of_another_shape_or_type_are_refused_and_nothing_is_written() {
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let [logits, labels] = batch(4, 0);
    let gradient = of(&[9.0f32; 4 * CLASSES], [4, CLASSES]);
    let refused = |sums: &Tensor| {
        let of_classes =
            loss::cross_entropy(&compute, &logits, &labels, 1.0, Some(&gradient), sums);
        let of_values = loss::mse(&compute, &logits, &logits, 1.0, Some(&gradient), sums);
        assert_eq!(*gradient.read::<f32>().unwrap(), [9.0; 4 * CLASSES]);
        [of_classes.unwrap_err(), of_values.unwrap_err()]
    };
    for error in refused(&of(&[0.0; 2], [2])) {
        assert!(matches!(error, KernelError::Shape { operand: "sums", .. }), "{error}");
    }
    for error in refused(&of(&[0.0f32; 3], [3])) {
        assert!(error.to_string().contains("type f64, got f32"), "{error}");
    }
}
