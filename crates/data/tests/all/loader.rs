//! The loader gives the same samples as direct reads, in constant memory, and ends cleanly in every case.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use paceline_data::{
    Batch, DataError, Dataset, Field, Loader, LoaderConfig, OwnedSample, Position, Prefetch,
    Sample, SampleOrder, Sampler, Split, SyntheticImages, SyntheticImagesConfig,
    SyntheticRegression,
};
use paceline_memory::{Allocator, Category, DType, Tensor};

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
    let order = SampleOrder::Shuffled { seed: 9 };
    Sampler::new(dataset.len(), global_batch, rank, world, order).unwrap()
}

fn epochs(end_epoch: u64, prefetch: Prefetch) -> LoaderConfig {
    LoaderConfig { end_epoch, prefetch, ..LoaderConfig::default() }
}

fn check(batch: &Batch, dataset: &dyn Dataset, sampler: &Sampler) {
    let plan = sampler.epoch(batch.position.epoch);
    let share = plan.batch(batch.position.batch).unwrap();
    assert_eq!(batch.global_count, share.global_count);
    assert_eq!(batch.num_samples(), share.indices.len());
    let epoch = batch.position.epoch;
    let read = |&index: &u32| OwnedSample::read(dataset, epoch, index as usize).unwrap();
    let mut samples: Vec<OwnedSample> = share.indices.iter().map(read).collect();
    let longest = samples.iter().filter_map(OwnedSample::length).max().unwrap_or(1);
    for field in dataset.fields() {
        let tensor = batch.get(field.name()).unwrap();
        let mut dims = [&[samples.len()], field.extents()].concat();
        if field.is_ragged() {
            dims[1] = longest;
        }
        assert_eq!((tensor.dims(), tensor.dtype()), (dims.as_slice(), field.dtype()));
        let elems: usize = dims[1..].iter().product();
        for (row, sample) in samples.iter_mut().enumerate() {
            let place = row * elems..(row + 1) * elems;
            match field.dtype() {
                DType::I64 => {
                    let values = sample.i64(field.name());
                    compare(&tensor.read::<i64>().unwrap()[place], &values, -100);
                }
                _ => {
                    let values = sample.f32(field.name());
                    compare(&tensor.read::<f32>().unwrap()[place], &values, 0.5);
                }
            }
        }
    }
    let lengths: Vec<i64> = samples.iter().flat_map(|s| s.length().map(|n| n as i64)).collect();
    match batch.get("lengths") {
        Some(tensor) => assert_eq!(tensor.read::<i64>().unwrap()[..], lengths),
        None => assert!(lengths.is_empty()),
    }
}

/// A row has the values of its sample, and then the padding.
fn compare<T: PartialEq + std::fmt::Debug>(row: &[T], values: &[T], pad: T) {
    assert_eq!(row[..values.len()], *values);
    assert!(row[values.len()..].iter().all(|value| *value == pad), "{row:?}");
}

/// Samples of different lengths, with three ragged fields and a fixed one.
struct Ragged;

impl Dataset for Ragged {
    fn len(&self) -> usize {
        23
    }

    fn fields(&self) -> Vec<Field> {
        vec![
            Field::ragged_i64("inputs", 11, -100).below(1000),
            Field::ragged_i64("targets", 11, -100),
            Field::ragged_f32("weights", 11, &[2, 3], 0.5),
            Field::f32("score", []),
        ]
    }

    fn read(&self, epoch: u64, index: usize, sample: &mut Sample<'_>) {
        let length = 1 + (index * 7 + epoch as usize) % 11;
        sample.set_length(length);
        sample.f32("score")[0] = index as f32;
        for name in ["inputs", "targets"] {
            for (at, value) in sample.i64(name).iter_mut().enumerate() {
                *value = (index * 20 + at + name.len()) as i64;
            }
        }
        for (at, value) in sample.f32("weights").iter_mut().enumerate() {
            *value = (index * 100 + at) as f32;
        }
    }
}

#[test]
fn every_batch_is_what_direct_reads_give() {
    for dataset in [images(), regression(), Arc::new(Ragged)] {
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

/// Fails a test that hangs.
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

    fn fields(&self) -> Vec<Field> {
        vec![Field::f32("inputs", [1]), Field::class(3)]
    }

    fn read(&self, _epoch: u64, index: usize, sample: &mut Sample<'_>) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        sample.f32("inputs")[0] = 0.0;
        sample.set_class((self.read)(index));
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
            let sampler = Sampler::new(1000, 100, 0, 1, SampleOrder::Sequential).unwrap();
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
            let sampler = Sampler::new(1000, 100, 0, 1, SampleOrder::Sequential).unwrap();
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
        let sampler = Sampler::new(1000, 100, 0, 1, SampleOrder::Sequential).unwrap();
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

/// A data set with a mistake: what it writes does not fit its fields, or its inputs have too many extents.
struct Odd {
    fields: Vec<Field>,
    read: fn(&mut Sample<'_>),
}

impl Dataset for Odd {
    fn len(&self) -> usize {
        4
    }

    fn fields(&self) -> Vec<Field> {
        self.fields.clone()
    }

    fn read(&self, _epoch: u64, _index: usize, sample: &mut Sample<'_>) {
        (self.read)(sample);
    }
}

fn first_of(dataset: Odd, len: usize) -> String {
    let start = || {
        let sampler = Sampler::new(len, 2, 0, 1, SampleOrder::Sequential)?;
        let (dataset, config) = (Arc::new(dataset), LoaderConfig::default());
        Loader::new(dataset, sampler, Allocator::new(), config)?.next().transpose()
    };
    start().unwrap_err().to_string()
}

#[test]
fn samples_that_do_not_fit_their_fields_are_refused() {
    let ragged = || Field::ragged_i64("inputs", 3, 9).below(5);
    for (fields, read, expected) in [
        (ragged(), (|_| ()) as fn(&mut Sample<'_>), "it set no length"),
        (ragged(), |s| s.i64("inputs")[0] = 1, "inputs is ragged: call set_length first"),
        (ragged(), |s| s.set_length(4), "the length 4 is not from 1 to 3"),
        (ragged(), |s| s.set_length(0), "the length 0 is not from 1 to 3"),
        (ragged(), |s| s.f32("inputs")[0] = 1.0, "inputs is ragged"),
        (Field::i64("inputs", [2]), |s| s.set_length(2), "no field is ragged"),
        (Field::i64("inputs", [2]), |s| s.f32("inputs")[0] = 1.0, "has integers, not real"),
        (Field::f32("inputs", [2]), |s| s.i64("inputs")[0] = 1, "has real numbers, not integers"),
        (Field::f32("inputs", [2]), |s| s.set_class(1), "the data set has no field targets"),
    ] {
        let message = first_of(Odd { fields: vec![fields], read }, 4);
        let begin = "the data set panicked when sample 0 of epoch 0 was read: ";
        assert!(message.starts_with(begin) && message.contains(expected), "{message}");
    }
    let read: fn(&mut Sample<'_>) = |sample| {
        sample.set_length(2);
        sample.i64("inputs").copy_from_slice(&[4, 5]);
    };
    assert_eq!(
        first_of(Odd { fields: vec![ragged()], read }, 4),
        "sample 0 of epoch 0 has 5 in inputs, which is not from 0 to 5 - 1"
    );
}

#[test]
fn ragged_batches_use_the_same_memory_again() {
    for prefetch in MODES {
        let (allocator, dataset) = (Allocator::new(), Arc::new(Ragged));
        let sampler = sampler(&*dataset, 5, 0, 1);
        let loader = Loader::new(dataset, sampler, allocator.clone(), epochs(20, prefetch));
        let mut loader = loader.unwrap();
        let (blocks, bytes) =
            (allocator.fresh_blocks(), allocator.usage(Category::Data).peak_bytes);
        let dims = |batch: Result<Batch, _>| batch.unwrap().get("inputs").map(|t| t.dims()[1]);
        let mut lengths: Vec<_> = loader.by_ref().filter_map(dims).collect();
        assert_eq!(lengths.len(), 100);
        lengths.dedup();
        assert!(lengths.len() > 5, "the batches have different lengths: {lengths:?}");
        // Two threads give blocks back in any order, so small tensors may lie in all large blocks at once. Then a large
        // tensor needs one more, but not more of them than there are batches.
        let more = match prefetch {
            Prefetch::None => 0,
            Prefetch::Background { depth } => depth as u64 + 2,
        };
        let fresh = allocator.fresh_blocks() - blocks;
        assert!(fresh <= more, "{prefetch:?}: {fresh} more");
        assert_eq!(allocator.usage(Category::Data).peak_bytes, bytes, "{prefetch:?}");
    }
}

#[test]
fn a_rank_without_samples_has_ragged_batches_of_length_1() {
    let sampler = sampler(&Ragged, 5, 6, 7);
    let config = epochs(1, Prefetch::None);
    let mut loader = Loader::new(Arc::new(Ragged), sampler, Allocator::new(), config).unwrap();
    let batch = loader.next().unwrap().unwrap();
    let dims = |name| batch.get(name).map(Tensor::dims);
    assert_eq!(dims("inputs"), Some([0, 1].as_slice()));
    assert_eq!(dims("weights"), Some([0, 1, 2, 3].as_slice()));
    assert_eq!(dims("lengths"), Some([0].as_slice()));
}

#[test]
fn a_data_set_that_does_not_fit_is_refused() {
    let message = |shape: &[usize], len| {
        let fields = vec![Field::f32("inputs", shape), Field::f32("targets", [1])];
        first_of(Odd { fields, read: |sample| sample.set_class(1) }, len)
    };
    assert_eq!(
        message(&[1], 5),
        "the sampler's number of samples must be the data set's length 4, got 5"
    );
    assert_eq!(
        message(&[1, 1, 1, 1], 4),
        "the fields of the data set: inputs has 4 extents; at most 3 are possible"
    );
    assert_eq!(
        message(&[1], 4),
        "the data set panicked when sample 0 of epoch 0 was read: \
         the field targets has real numbers, not integers"
    );
    assert!(message(&[1 << 59], 4).starts_with("out of memory"));
}
