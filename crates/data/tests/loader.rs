//! The loader gives the same samples as direct reads, in constant memory, and ends cleanly in every case.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use paceline_data::{
    Batch, DataError, Dataset, Loader, LoaderConfig, Order, Position, Prefetch, Sampler, Split,
    SyntheticImages, SyntheticImagesConfig, SyntheticRegression, TargetMut, TargetSpec,
};
use paceline_memory::{Allocator, Category};

const MODES: [Prefetch; 4] = [
    Prefetch::None,
    Prefetch::Background { depth: 0 },
    Prefetch::Background { depth: 1 },
    Prefetch::Background { depth: 2 },
];

fn images() -> Arc<dyn Dataset> {
    let config = SyntheticImagesConfig {
        height: 5,
        width: 4,
        channels: 3,
        num_classes: 10,
        len: 23,
        seed: 1,
        split: Split::Train,
    };
    Arc::new(SyntheticImages::new(config).unwrap())
}

fn regression() -> Arc<dyn Dataset> {
    Arc::new(SyntheticRegression::new(7, 3, 23, 1).unwrap())
}

fn sampler(dataset: &dyn Dataset, global_batch: usize, rank: usize, world: usize) -> Sampler {
    let order = Order::Shuffled { seed: 9 };
    Sampler::new(dataset.len(), global_batch, rank, world, order).unwrap()
}

fn epochs(end_epoch: u64, prefetch: Prefetch) -> LoaderConfig {
    LoaderConfig { end_epoch, prefetch, ..LoaderConfig::default() }
}

/// Compares a batch with reading its samples one by one.
fn check(batch: &Batch, dataset: &dyn Dataset, sampler: &Sampler) {
    let plan = sampler.epoch(batch.position.epoch);
    let share = plan.batch(batch.position.batch).unwrap();
    assert_eq!(batch.global_count, share.global_count);
    let mut dims = vec![share.indices.len()];
    dims.extend(dataset.input_shape());
    assert_eq!(batch.inputs.dims(), dims);

    let elems: usize = dataset.input_shape().iter().product();
    let inputs = batch.inputs.read::<f32>().unwrap();
    for (row, &index) in share.indices.iter().enumerate() {
        let mut input = vec![f32::NAN; elems];
        match dataset.target() {
            TargetSpec::Class { .. } => {
                let mut class = -1;
                let target = TargetMut::Class(&mut class);
                dataset.read(batch.position.epoch, index as usize, &mut input, target);
                assert_eq!(batch.targets.dims(), [share.indices.len()]);
                assert_eq!(batch.targets.read::<i64>().unwrap()[row], class);
            }
            TargetSpec::Values { dim } => {
                let mut values = vec![f32::NAN; dim];
                let target = TargetMut::Values(&mut values);
                dataset.read(batch.position.epoch, index as usize, &mut input, target);
                assert_eq!(batch.targets.dims(), [share.indices.len(), dim]);
                assert_eq!(batch.targets.read::<f32>().unwrap()[row * dim..][..dim], values);
            }
        }
        assert_eq!(inputs[row * elems..][..elems], input);
    }
}

#[test]
fn every_batch_is_what_direct_reads_give() {
    for dataset in [images(), regression()] {
        for prefetch in MODES {
            // 23 samples in batches of 5: the last batch has 3 samples, so the last of four ranks gets none.
            for (rank, world) in [(0, 1), (0, 4), (3, 4), (6, 7)] {
                let sampler = sampler(&*dataset, 5, rank, world);
                let config = epochs(3, prefetch);
                let loader =
                    Loader::new(dataset.clone(), sampler.clone(), Allocator::new(), config)
                        .unwrap();
                let mut positions = Vec::new();
                for batch in loader {
                    let batch = batch.unwrap();
                    check(&batch, &*dataset, &sampler);
                    positions.push((batch.position.epoch, batch.position.batch));
                }
                let expected: Vec<_> = (0..3).flat_map(|e| (0..5).map(move |s| (e, s))).collect();
                assert_eq!(positions, expected);
            }
        }
    }
}

#[test]
fn a_start_in_the_middle_continues_where_another_run_stopped() {
    let dataset = regression();
    let first = |start, end_epoch| {
        let config = LoaderConfig { start, end_epoch, ..LoaderConfig::default() };
        let sampler = sampler(&*dataset, 5, 0, 1);
        let mut loader = Loader::new(dataset.clone(), sampler.clone(), Allocator::new(), config)?;
        let batch = loader.next().transpose()?;
        batch.iter().for_each(|batch| check(batch, &*dataset, &sampler));
        Ok::<_, DataError>(batch.map(|batch| (batch.position.epoch, batch.position.batch)))
    };
    assert_eq!(first(Position { epoch: 1, batch: 3 }, 2).unwrap(), Some((1, 3)));
    // A run may have stopped after the last batch of an epoch.
    assert_eq!(first(Position { epoch: 1, batch: 5 }, 3).unwrap(), Some((2, 0)));
    assert_eq!(first(Position { epoch: 1, batch: 5 }, 2).unwrap(), None);
    assert_eq!(first(Position { epoch: 2, batch: 0 }, 2).unwrap(), None);
    assert_eq!(
        first(Position { epoch: 0, batch: 6 }, 2).unwrap_err().to_string(),
        "the first batch must be at most 5, got 6"
    );
}

#[test]
fn memory_is_taken_once_and_given_back() {
    for prefetch in MODES {
        let batches = match prefetch {
            Prefetch::None => 1,
            Prefetch::Background { depth } => depth as u64 + 2,
        };
        let (allocator, dataset) = (Allocator::new(), regression());
        let sampler = sampler(&*dataset, 5, 0, 1);
        let config = epochs(50, prefetch);
        let mut loader = Loader::new(dataset, sampler, allocator.clone(), config).unwrap();
        assert_eq!(allocator.fresh_blocks(), 2 * batches);
        assert_eq!(loader.by_ref().map(Result::unwrap).count(), 250);
        assert!(loader.next().is_none());
        assert_eq!(allocator.fresh_blocks(), 2 * batches, "{prefetch:?}");
        let usage = allocator.usage(Category::Data);
        // 5 samples of 7 inputs and 3 targets, 4 bytes each.
        assert_eq!((usage.current_bytes, usage.peak_bytes), (0, batches * 200));
    }
}

/// Fails a test that hangs, instead of hanging with it.
fn within_seconds<R: Send + 'static>(seconds: u64, work: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn(move || sender.send(work()).is_ok());
    let result = receiver.recv_timeout(Duration::from_secs(seconds)).expect("it hangs");
    assert!(thread.join().unwrap());
    result
}

/// A user's own data set of classes, which counts its reads.
struct Custom {
    read: fn(usize) -> i64,
    reads: AtomicUsize,
}

impl Custom {
    fn new(read: fn(usize) -> i64) -> Arc<Self> {
        Arc::new(Self { read, reads: AtomicUsize::new(0) })
    }
}

impl Dataset for Custom {
    fn len(&self) -> usize {
        1000
    }

    fn input_shape(&self) -> &[usize] {
        &[1]
    }

    fn target(&self) -> TargetSpec {
        TargetSpec::Class { num_classes: 3 }
    }

    fn read(&self, _epoch: u64, index: usize, input: &mut [f32], target: TargetMut<'_>) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        input[0] = 0.0;
        target.set_class((self.read)(index));
    }
}

#[test]
fn dropping_the_loader_ends_its_thread_at_once() {
    for batches in [0, 1, 3] {
        // A batch takes 10 seconds to read, except for the first ones.
        let slow = Custom::new(|index| {
            thread::sleep(Duration::from_millis(if index < 300 { 0 } else { 100 }));
            0
        });
        let dataset = slow.clone();
        within_seconds(60, move || {
            let sampler = Sampler::new(1000, 100, 0, 1, Order::Sequential).unwrap();
            let allocator = Allocator::new();
            let config = LoaderConfig::default();
            let mut loader = Loader::new(dataset, sampler, allocator.clone(), config).unwrap();
            for _ in 0..batches {
                assert!(loader.next().unwrap().is_ok());
            }
            drop(loader);
            assert_eq!(allocator.usage(Category::Data).current_bytes, 0);
        });
        // Only this test still holds the data set, so the thread has ended.
        assert_eq!(Arc::strong_count(&slow), 1);
        assert!(slow.reads.load(Ordering::Relaxed) < 400);
    }
}

#[test]
fn a_panic_in_the_data_set_is_an_error_and_the_end() {
    for prefetch in MODES {
        let results = within_seconds(60, move || {
            let dataset = Custom::new(|index| {
                assert!(index != 250, "no sample {index} here");
                0
            });
            let sampler = Sampler::new(1000, 100, 0, 1, Order::Sequential).unwrap();
            let config = epochs(1, prefetch);
            let mut loader = Loader::new(dataset, sampler, Allocator::new(), config).unwrap();
            [(); 5].map(|()| {
                loader.next().map(|r| r.map(|b| b.position.batch).map_err(|e| e.to_string()))
            })
        });
        let said = "the data set panicked when sample 250 of epoch 0 was read: no sample 250 here";
        let end = Some(Err(said.to_owned()));
        assert_eq!(results, [Some(Ok(0)), Some(Ok(1)), end, None, None], "{prefetch:?}");
    }
}

#[test]
fn a_class_out_of_range_names_its_sample() {
    let first = |read: fn(usize) -> i64| {
        let sampler = Sampler::new(1000, 100, 0, 1, Order::Sequential).unwrap();
        let config = LoaderConfig::default();
        let loader = Loader::new(Custom::new(read), sampler, Allocator::new(), config).unwrap();
        loader.last().unwrap().unwrap_err().to_string()
    };
    assert_eq!(
        first(|index| if index == 7 { 3 } else { 2 }),
        "sample 7 of epoch 0 has the class 3, not one of 0..3"
    );
    assert_eq!(first(|_| -1), "sample 0 of epoch 0 has the class -1, not one of 0..3");
}

/// A data set that writes a different kind of target than it announces, and whose inputs may have too many
/// extents.
struct Odd(Vec<usize>);

impl Dataset for Odd {
    fn len(&self) -> usize {
        4
    }

    fn input_shape(&self) -> &[usize] {
        &self.0
    }

    fn target(&self) -> TargetSpec {
        TargetSpec::Values { dim: 1 }
    }

    fn read(&self, _epoch: u64, _index: usize, _input: &mut [f32], target: TargetMut<'_>) {
        target.set_class(1);
    }
}

#[test]
fn a_data_set_that_does_not_fit_is_refused() {
    let start = |shape: &[usize], len| {
        let sampler = Sampler::new(len, 2, 0, 1, Order::Sequential).unwrap();
        let dataset = Arc::new(Odd(shape.to_vec()));
        let mut loader = Loader::new(dataset, sampler, Allocator::new(), LoaderConfig::default())?;
        loader.next().transpose()
    };
    let message = |shape: &[usize], len| start(shape, len).unwrap_err().to_string();
    assert_eq!(
        message(&[1], 5),
        "the sampler's number of samples must be the data set's length 4, got 5"
    );
    assert_eq!(
        message(&[1, 1, 1, 1], 4),
        "the number of extents of an input must be at most 3, got 4"
    );
    assert_eq!(
        message(&[1], 4),
        "the data set panicked when sample 0 of epoch 0 was read: \
         a class was written to a target of values"
    );
    assert!(message(&[1 << 59], 4).starts_with("out of memory"));
}
