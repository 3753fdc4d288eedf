//! Batch normalization over a batch that is divided into shares. With statistics over all shares, the shares
//! give the same results as the whole batch. Without, each share uses its own statistics.

use std::ops::Range;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType, Tensor};
use paceline_model::{Context, Half, Layer, OpenUnits, ParamId, PassHooks, Result};

use crate::common::{cnn_with_batch_norm, initialized, numbers, values};

/// For f64 sums of a few thousand products of size one, in a different order. Statistics of half a batch
/// would be off by a tenth.
const TOLERANCE: f64 = 1e-12;

/// After this time a share counts as hanging.
const HANGS: Duration = Duration::from_secs(60);

/// Sums tensors over several threads. All threads take part in every sum.
struct Meeting {
    total: Mutex<Vec<f64>>,
    shares: usize,
    /// The number of arrivals of all threads.
    arrived: Mutex<usize>,
    changed: Condvar,
}

impl Meeting {
    fn new(shares: usize) -> Self {
        Self { total: Mutex::default(), shares, arrived: Mutex::new(0), changed: Condvar::new() }
    }

    /// Waits for all shares. Returns true for one of them. Fails if a share does not come.
    fn wait(&self) -> bool {
        let mut arrived = self.arrived.lock().unwrap();
        *arrived += 1;
        self.changed.notify_all();
        let (number, all) = (*arrived, arrived.next_multiple_of(self.shares));
        let is_short = |arrived: &mut usize| *arrived < all;
        let (arrived, waited) = self.changed.wait_timeout_while(arrived, HANGS, is_short).unwrap();
        assert!(!waited.timed_out(), "{arrived} arrivals, {all} awaited");
        number == all
    }

    fn sum(&self, tensor: &Tensor) {
        let mut mine = tensor.write::<f64>().unwrap();
        {
            let mut total = self.total.lock().unwrap();
            total.resize(mine.len(), 0.0);
            total.iter_mut().zip(mine.iter()).for_each(|(total, mine)| *total += mine);
        }
        self.wait();
        mine.copy_from_slice(&self.total.lock().unwrap());
        if self.wait() {
            self.total.lock().unwrap().clear();
        }
        self.wait();
    }
}

/// The hooks of one share. With a meeting, statistics are summed over several shares.
struct Share<'a>(Option<&'a Meeting>);

impl PassHooks for Share<'_> {
    fn gradient_ready(&mut self, _: ParamId) -> Result<()> {
        Ok(())
    }

    fn syncs_statistics(&self) -> bool {
        self.0.is_some()
    }

    fn sum_over_ranks(&mut self, sums: &Tensor) -> Result<()> {
        self.0.expect("asked only if it is there").sum(sums);
        Ok(())
    }
}

/// The results of a share of the batch.
struct Outcome {
    output: Vec<f64>,
    d_input: Vec<f64>,
    gradients: Vec<f64>,
    buffers: Vec<f64>,
}

const BATCH: usize = 5;

/// Runs both passes on the samples in `range` of the whole batch.
fn run(range: Range<usize>, meeting: Option<&Meeting>) -> Outcome {
    let model = cnn_with_batch_norm();
    let compute = Compute::new(1, Allocator::new()).unwrap();
    let storage = initialized(&model, DType::F64, &compute.allocator, 3);
    let part = |dims: [usize; 4], seed: u64| {
        let all = numbers(&compute.allocator, &dims, seed);
        let elems = dims[1..].iter().product::<usize>();
        let shape = [range.len(), dims[1], dims[2], dims[3]];
        let part = compute.allocator.tensor(DType::F64, shape, Category::Data).unwrap();
        let from = &all.read::<f64>().unwrap()[range.start * elems..range.end * elems];
        part.write::<f64>().unwrap().copy_from_slice(from);
        part
    };
    let input = part([BATCH, 9, 8, 2], 6);
    let d_output = part([BATCH, 5, 1, 1], 7).view([range.len(), 5]).unwrap();
    let mut units = OpenUnits::new(&model.layout);
    let mut hooks = Share(meeting);
    let mut cx = Context::training(&compute, &storage, &mut units, &mut hooks);
    let (output, mut saved) = model.network().forward(&mut cx, input).unwrap();
    let whole = Half::Whole { wants_input: true };
    let d_input = model.network().backward(&mut cx, &mut saved, d_output, whole).unwrap();
    Outcome {
        output: values(&output),
        d_input: values(&d_input.unwrap()),
        gradients: values(storage.grads().tensor()),
        buffers: values(storage.buffers()),
    }
}

#[track_caller]
fn assert_close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let limit = TOLERANCE * want.abs().max(1.0);
        assert!((got - want).abs() < limit, "{what}[{at}]: {got}, not {want}");
    }
}

#[test]
fn shares_with_common_statistics_give_what_the_whole_batch_gives() {
    let whole = run(0..BATCH, None);
    // In one case a share has no samples; its gradients are zero.
    for shares in [vec![0..2, 2..5], vec![0..0, 0..5], vec![0..1, 1..2, 2..5]] {
        let meeting = Meeting::new(shares.len());
        let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
            let run = |range: &Range<usize>| {
                let (range, meeting) = (range.clone(), &meeting);
                scope.spawn(move || run(range, Some(meeting)))
            };
            let threads: Vec<_> = shares.iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let joined = |part: fn(&Outcome) -> &Vec<f64>| {
            outcomes.iter().flat_map(|outcome| part(outcome).clone()).collect::<Vec<f64>>()
        };
        assert_close(&joined(|o| &o.output), &whole.output, "output");
        assert_close(&joined(|o| &o.d_input), &whole.d_input, "gradient of the input");
        let sum = |at: usize| outcomes.iter().map(|outcome| outcome.gradients[at]).sum();
        let gradients: Vec<f64> = (0..whole.gradients.len()).map(sum).collect();
        assert_close(&gradients, &whole.gradients, "gradients");
        for outcome in &outcomes {
            assert_close(&outcome.buffers, &whole.buffers, "running statistics");
            assert_eq!(outcome.buffers, outcomes[0].buffers, "the same bits everywhere");
        }
    }
}

#[test]
fn shares_without_them_follow_their_own() {
    let (whole, half, other) = (run(0..BATCH, None), run(0..2, None), run(2..BATCH, None));
    assert_ne!(half.output, whole.output[..half.output.len()]);
    assert_ne!(half.buffers, whole.buffers);
    assert_ne!(half.buffers, other.buffers);
    // Mean 0 and variance 1 are the initial values: an empty share does not change them.
    let empty = run(0..0, None);
    let layout = cnn_with_batch_norm().layout;
    for buffer in layout.buffers() {
        assert!(empty.buffers[buffer.range()].iter().all(|x| *x == buffer.init), "{}", buffer.name);
    }
}
