//! Memory and streams of a card, which may be emulated. Without one each test says so and passes, unless `PACELINE_CARD=1`.

use std::time::{Duration, Instant};

use paceline_cuda::Card;
use paceline_emulated_card::for_tests::is_ready;
use paceline_memory::{
    Accelerator, Access, Allocator, Category, DType, DeviceStream, Event, EventState, MemoryError,
    Signal, Stream, Tensor,
};

/// How long work may take.
const LIMIT: Duration = Duration::from_secs(60);

/// A stream of a card, if there is one.
fn compute() -> Option<DeviceStream> {
    let card = is_ready().then(|| Card::open(0).unwrap())?;
    Some(Accelerator::cuda(card).stream("compute").unwrap())
}

fn tensor(allocator: &Allocator, len: usize) -> Tensor {
    allocator.tensor(DType::F32, [len], Category::Data).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.read::<f32>().unwrap().to_vec()
}

#[test]
fn copies_wait_for_each_other_by_streams_and_events() {
    let Some(compute) = compute() else { return };
    let copy = compute.accelerator().stream("copy").unwrap();
    let (host, memory) = (Allocator::pinned(compute.accelerator()), Allocator::on(&compute));
    let (from, there, other) = (tensor(&host, 5), tensor(&memory, 5), tensor(&memory, 5));
    from.write::<f32>().unwrap().copy_from_slice(&[1.0, -2.0, 3.5, f32::MAX, 0.0]);
    let arrived = copy.copy(&from, &there).unwrap();
    compute.wait(&arrived);
    let moved = compute.copy(&there, &other).unwrap();
    let cleared = compute.fill(&there, 0).unwrap();
    copy.wait(&moved);
    let back = tensor(&host, 5);
    copy.copy(&other, &back).unwrap().wait();
    assert_eq!(values(&back), values(&from));
    cleared.wait();
    assert_eq!(values(&there.to_host().unwrap()), [0.0; 5]);
    let ran = moved.ran().unwrap();
    assert!(ran.start_ns <= ran.end_ns, "{ran:?}");
}

#[test]
fn a_wait_that_is_missing_is_an_error_at_once() {
    let Some(compute) = compute() else { return };
    let copy = compute.accelerator().stream("copy").unwrap();
    let (host, memory) = (Allocator::pinned(compute.accelerator()), Allocator::on(&compute));
    let (from, there) = (tensor(&host, 4), tensor(&memory, 4));
    from.write::<f32>().unwrap().fill(1.0);
    copy.copy(&from, &there).unwrap();
    let error = compute.fill(&there, 0).unwrap_err();
    assert!(matches!(error, MemoryError::Unordered { .. }), "{error}");
    assert!(there.read::<f32>().is_err(), "the host cannot reach it");
    compute.wait(&copy.record());
    compute.fill(&there, 0).unwrap();
}

/// An emulated card does a piece of its work at each query.
#[test]
fn a_query_of_an_event_says_when_its_work_is_done() {
    let Some(compute) = compute() else { return };
    let (host, memory) = (Allocator::pinned(compute.accelerator()), Allocator::on(&compute));
    let (from, there, to) = (tensor(&host, 64), tensor(&memory, 64), tensor(&host, 64));
    for round in 1..=10 {
        from.write::<f32>().unwrap().fill(round as f32);
        compute.copy(&from, &there).unwrap();
        let arrived = compute.copy(&there, &to).unwrap();
        let begin = Instant::now();
        while arrived.state() != EventState::Complete {
            assert!(begin.elapsed() < LIMIT, "{:?} after {LIMIT:?}", arrived.state());
            std::thread::yield_now();
        }
        assert_eq!(values(&to), [round as f32; 64]);
    }
}

/// On an emulated card the two streams run in an order that is drawn, so one of the rounds shows it if nobody waits.
#[test]
fn memory_that_another_stream_still_reads_is_given_to_nobody() {
    let Some(compute) = compute() else { return };
    let copy = compute.accelerator().stream("copy").unwrap();
    let (host, memory) = (Allocator::pinned(compute.accelerator()), Allocator::on(&compute));
    let (from, to) = (tensor(&host, 64), tensor(&host, 64));
    for round in 1..=40 {
        from.write::<f32>().unwrap().fill(round as f32);
        let read = tensor(&memory, 64);
        compute.copy(&from, &read).unwrap();
        copy.wait(&compute.record());
        let arrived = copy.copy(&read, &to).unwrap();
        drop(read);
        let next = tensor(&memory, 64);
        compute.fill(&next, 0).unwrap();
        compute.synchronize().unwrap();
        arrived.wait();
        assert_eq!(values(&to), [round as f32; 64]);
    }
}

/// A piece of the host's work that writes three numbers, the stream of a card that copies them afterwards, and their target.
struct Awaited {
    signal: Signal,
    address: usize,
    copied: Event,
    there: Tensor,
    _keeps: (Tensor, DeviceStream),
}

impl Awaited {
    fn new(compute: &DeviceStream) -> Self {
        let back = compute.accelerator().stream("to device").unwrap();
        let (host, memory) = (Allocator::pinned(compute.accelerator()), Allocator::on(compute));
        let (sum, first, there) = (tensor(&host, 3), tensor(&memory, 3), tensor(&memory, 3));
        let (done, signal) = Stream::new("dp").submit();
        let claimed = sum.queue(Access::Write, "all_reduce", &done).unwrap();
        back.wait(&done);
        back.copy(&sum, &first).unwrap();
        // This waits for nothing but the copy before it.
        let copied = back.copy(&first, &there).unwrap();
        let address = claimed.base().as_ptr().addr();
        Self { signal, address, copied, there, _keeps: (sum, back) }
    }

    /// Does the work on another thread, and waits for the card.
    fn end(self, compute: &DeviceStream, value: f32) {
        let Self { signal, address, copied, there, _keeps } = self;
        let worker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            // SAFETY: the range has three elements and is queued for this work.
            unsafe { std::slice::from_raw_parts_mut(address as *mut f32, 3) }.fill(value);
            signal.complete();
        });
        assert_eq!(copied.wait(), EventState::Complete);
        worker.join().unwrap();
        compute.wait(&copied);
        assert_eq!(values(&there.to_host().unwrap()), [value; 3]);
    }
}

#[test]
fn the_card_waits_for_work_of_the_host_and_the_program_goes_on() {
    let Some(compute) = compute() else { return };
    Awaited::new(&compute).end(&compute, 4.0);
}

/// Ranks that share a card wait for each other: a stream that waits for the host must not hold up another one that does.
#[test]
fn streams_wait_for_the_host_each_for_itself() {
    let Some(compute) = compute() else { return };
    let [first, second] = [0, 1].map(|_| Awaited::new(&compute));
    second.end(&compute, 5.0);
    first.end(&compute, 6.0);
}

#[test]
fn memory_of_the_host_stays_while_the_card_copies_it_and_goes_back_afterwards() {
    let Some(compute) = compute() else { return };
    let (host, memory) = (Allocator::pinned(compute.accelerator()), Allocator::on(&compute));
    let there = tensor(&memory, 1000);
    for round in 0..200 {
        let from = tensor(&host, 1000);
        from.write::<f32>().unwrap().fill(round as f32);
        compute.copy(&from, &there).unwrap();
    }
    compute.synchronize().unwrap();
    assert_eq!(values(&there.to_host().unwrap()), [199.0; 1000]);
    assert_eq!(host.total().current_bytes, 0);
}

#[test]
fn too_large_a_request_says_how_much_is_free() {
    let Some(compute) = compute() else { return };
    let memory = Allocator::on(&compute);
    let error = memory.tensor(DType::F32, [1 << 44], Category::Gradients).unwrap_err().to_string();
    for words in ["out of memory", "70368744177664 bytes", "are free", "gradients"] {
        assert!(error.contains(words), "{error}");
    }
    // The refused request leaves no trace.
    tensor(&memory, 4);
}
