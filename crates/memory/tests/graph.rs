//! Work of a card, which may be emulated, that is captured once and replayed. Without a card each test says so and passes, unless
//! `PACELINE_CARD=1`.

use paceline_cuda::Card;
use paceline_emulated_card::for_tests::is_ready;
use paceline_memory::{
    Accelerator, Access, Allocator, Category, DType, DeviceStream, GraphPool, GraphedWork,
    MemoryError, Tensor,
};
use paceline_trace::Shapes;

/// A stream of a card, if there is one, and memory of it.
fn start() -> Option<(DeviceStream, Allocator)> {
    let card = is_ready().then(|| Card::open(0).unwrap())?;
    let stream = Accelerator::cuda(card).stream("compute").unwrap();
    let memory = Allocator::on(&stream);
    Some((stream, memory))
}

fn tensor(allocator: &Allocator, len: usize) -> Tensor {
    allocator.tensor(DType::F32, [len], Category::Data).unwrap()
}

fn write(tensor: &Tensor, value: f32) {
    tensor.overwrite::<f32, _>(|to| to.fill(value)).unwrap();
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.to_host().unwrap().read::<f32>().unwrap().to_vec()
}

/// `y = x`, by way of memory that is taken and given back.
fn copy_by_another(memory: &Allocator, x: &Tensor, y: &Tensor) -> Result<(), MemoryError> {
    let between = memory.tensor(DType::F32, x.shape(), Category::Activations)?;
    between.copy_from(x)?;
    y.copy_from(&between)
}

#[test]
fn replayed_work_reads_the_values_of_now() {
    let Some((stream, memory)) = start() else { return };
    let (x, y) = (tensor(&memory, 100), tensor(&memory, 100));
    let mut work = GraphedWork::new(&GraphPool::new(&memory).unwrap());
    let mut runs = 0;
    for round in 0..6 {
        write(&x, round as f32);
        let mut run = || {
            let runs = &mut runs;
            work.run(|| {
                *runs += 1;
                copy_by_another(&memory, &x, &y).map(|()| round)
            })
        };
        // After the third time, the function is not called any more, and the third result is returned.
        assert_eq!(run().unwrap(), round.min(2));
        assert_eq!(values(&y), [round as f32; 100]);
        if round > 2 {
            // Others do not get the memory between the two copies.
            let others = [(); 3].map(|()| tensor(&memory, 100));
            others.iter().for_each(|other| write(other, -1.0));
            run().unwrap();
            assert!(others.iter().all(|other| values(other) == [-1.0; 100]), "round {round}");
        }
    }
    assert_eq!(runs, 3);
    stream.synchronize().unwrap();
    // The graph holds the memory that it writes to.
    let bytes = |memory: &Allocator| memory.total().current_bytes;
    drop((x, y));
    assert_eq!(bytes(&memory), 800);
    drop(work);
    assert_eq!(bytes(&memory), 0);
    let before = memory.fresh_blocks();
    // More than there is outside of the graph pool, which has 32 MiB like the rest.
    let all: Vec<Tensor> = (0..10).map(|_| tensor(&memory, 1_500_000)).collect();
    assert_eq!(
        (all.len(), memory.fresh_blocks()),
        (10, before),
        "the memory of the pool serves others"
    );
}

#[test]
fn a_launch_queues_the_uses_of_its_work() {
    let Some((stream, memory)) = start() else { return };
    let copies = stream.accelerator().stream("copy").unwrap();
    let host = Allocator::pinned(stream.accelerator());
    let (from, x, y) = (tensor(&host, 8), tensor(&memory, 8), tensor(&memory, 8));
    write(&x, 1.0);
    let mut work = GraphedWork::new(&GraphPool::new(&memory).unwrap());
    let mut run = || work.run(|| copy_by_another(&memory, &x, &y));
    for _ in 0..4 {
        run().unwrap();
    }
    // Others write memory that the graph reads, when it is their turn.
    let error = copies.copy(&from, &x).unwrap_err();
    assert!(matches!(error, MemoryError::Unordered { .. }), "{error}");
    from.write::<f32>().unwrap().fill(2.0);
    copies.wait(&stream.record());
    let copied = copies.copy(&from, &x).unwrap();
    let error = run().unwrap_err();
    assert!(matches!(error, MemoryError::Unordered { by: Some(_), .. }), "{error}");
    stream.wait(&copied);
    run().unwrap();
    assert_eq!(values(&y), [2.0; 8]);
    // The same for memory that it writes.
    let back = copies.copy(&y, &from);
    assert!(back.is_ok(), "the host has waited");
    let error = run().unwrap_err();
    assert!(matches!(error, MemoryError::Unordered { how: "read", .. }), "{error}");
    stream.wait(&back.unwrap());
    run().unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn what_a_graph_cannot_have_is_refused_and_the_stream_goes_on() {
    let Some((stream, memory)) = start() else { return };
    let (x, y) = (tensor(&memory, 10), tensor(&memory, 10));
    let other = stream.accelerator().stream("other").unwrap();
    let host = Allocator::pinned(stream.accelerator());
    let (from, elsewhere) = (tensor(&host, 10), tensor(&memory, 1));
    write(&x, 3.0);
    let pool = GraphPool::new(&memory).unwrap();
    let refused = |words: &str, run: &dyn Fn() -> Result<(), MemoryError>| {
        let mut work = GraphedWork::new(&pool);
        // The first two runs are not captured.
        (0..2).for_each(|_| work.run(|| copy_by_another(&memory, &x, &y)).unwrap());
        let error = work.run(run).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        work.run(|| copy_by_another(&memory, &x, &y)).unwrap();
        work.run(|| Ok::<_, MemoryError>(())).unwrap();
        assert_eq!(values(&y), [3.0; 10]);
    };
    let part = "a part of a graph of a card: ";
    refused(&format!("{part}a copy from or to memory"), &|| x.to_host().map(drop));
    refused(&format!("{part}a copy from or to memory"), &|| y.copy_from(&from));
    refused(&format!("{part}the host waits"), &|| stream.synchronize());
    refused(&format!("{part}a wait for another stream"), &|| {
        stream.wait(&other.fill(&elsewhere, 0)?);
        y.copy_from(&x)
    });
    refused("was not captured", &|| {
        // A wait for captured work, which will not run, returns.
        let state = stream.fill(&y, 0)?.wait();
        assert_eq!(state, paceline_memory::EventState::Failed);
        Err(MemoryError::NotCaptured("was not captured".into()))
    });
    // More memory than the second time: the driver refuses to give some during a capture.
    refused("STREAM_CAPTURE_UNSUPPORTED", &|| {
        let large = memory.tensor(DType::F32, [20 << 20], Category::Activations)?;
        large.copy_from(&large).or(Ok(()))
    });
    refused("another graph", &|| {
        let mut inner = GraphedWork::new(&pool);
        (0..3).try_for_each(|_| inner.run(|| copy_by_another(&memory, &x, &y)))
    });
    // Memory of the first run stays where others have memory too. Memory of the second would be overwritten by the next launch.
    let mut work = GraphedWork::new(&pool);
    let mut keeps = || work.run(|| memory.tensor(DType::F32, [10], Category::Activations));
    let _once = keeps().unwrap();
    let error = keeps().unwrap_err().to_string();
    assert!(error.contains("64 bytes of memory that it leaves in use"), "{error}");
}

#[test]
fn a_capture_that_fails_or_panics_leaves_the_stream_as_it_was() {
    let Some((stream, memory)) = start() else { return };
    let (x, y) = (tensor(&memory, 1000), tensor(&memory, 1000));
    let host = Allocator::pinned(stream.accelerator());
    let to = tensor(&host, 1000);
    let pool = GraphPool::new(&memory).unwrap();
    for (round, panics) in [false, true].into_iter().enumerate() {
        let value = 1.0 + round as f32;
        write(&x, value);
        write(&to, 0.0);
        let mut work = GraphedWork::new(&pool);
        (0..2).for_each(|_| work.run(|| copy_by_another(&memory, &x, &y)).unwrap());
        stream.copy(&x, &to).unwrap();
        let mut fails = || {
            work.run(|| -> Result<(), MemoryError> {
                stream.fill(&y, 0)?;
                assert!(!panics, "within a capture");
                Err(MemoryError::NotCaptured("on purpose".into()))
            })
        };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut fails));
        assert_eq!(outcome.is_err(), panics);
        // A wait for the stream covers the work that was put there before.
        stream.synchronize().unwrap();
        assert_eq!(to.read::<f32>().unwrap().to_vec(), [value; 1000]);
        // Other threads go on.
        std::thread::scope(|scope| scope.spawn(|| write(&y, 5.0)).join()).unwrap();
        assert_eq!(values(&y), [5.0; 1000]);
    }
    drop((x, y));
    assert_eq!(
        memory.total().current_bytes,
        0,
        "nobody holds the memory of the work that did not run"
    );
}

#[test]
fn memory_of_another_pool_is_held_and_queued() {
    let Some((stream, memory)) = start() else { return };
    let (of_one, of_other) = (GraphPool::new(&memory).unwrap(), GraphPool::new(&memory).unwrap());
    let y = tensor(&memory, 10);
    let mut leaves = GraphedWork::new(&of_one);
    let mut left = None;
    leaves.run(|| Ok::<_, MemoryError>(())).unwrap();
    let error = leaves.run(|| {
        left = Some(tensor(&memory, 10));
        Ok::<_, MemoryError>(())
    });
    assert!(error.is_err(), "it leaves memory in use");
    let left = left.unwrap();
    write(&left, 7.0);
    let mut work = GraphedWork::new(&of_other);
    (0..3).for_each(|_| work.run(|| y.copy_from(&left)).unwrap());
    drop(left);
    assert_eq!(memory.total().current_bytes, 80, "the graph holds both");
    work.run(|| Ok::<_, MemoryError>(())).unwrap();
    assert_eq!(values(&y), [7.0; 10]);
    stream.synchronize().unwrap();
}

#[test]
fn a_graph_holds_no_memory_of_work_that_was_refused() {
    let Some((stream, memory)) = start() else { return };
    let (x, y, of_refused) = (tensor(&memory, 10), tensor(&memory, 10), tensor(&memory, 10));
    let mut work = GraphedWork::new(&GraphPool::new(&memory).unwrap());
    write(&x, 1.0);
    for _ in 0..3 {
        let run = || {
            let refused: Result<_, MemoryError> =
                stream.launch("refused", Shapes::default(), |event| {
                    of_refused.queue(Access::Write, "refused", event)?;
                    Err(MemoryError::NotCaptured("on purpose".into()))
                });
            assert!(refused.is_err());
            y.copy_from(&x)
        };
        work.run(run).unwrap();
    }
    drop(of_refused);
    assert_eq!(memory.total().current_bytes, 80, "x and y");
    stream.synchronize().unwrap();
}

#[test]
fn only_cards_have_graphs() {
    for memory in [Allocator::new(), Allocator::meta()] {
        let error = GraphPool::new(&memory).unwrap_err();
        assert!(matches!(error, MemoryError::NotCaptured(_)), "{error}");
    }
}
