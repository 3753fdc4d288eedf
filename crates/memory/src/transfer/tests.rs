//! Copies and kernels, above all on the emulated accelerator: their order, their memory and their time.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::{Accelerator, Allocator, Buffer, DType, EventState, SimSpec};

/// A device in each mode: the timed one, and a few orders of the late one.
fn devices() -> Vec<Accelerator> {
    let quick = SimSpec { launch: Duration::ZERO, ..SimSpec::DEFAULT };
    let late = (0..8).map(|seed| Accelerator::sim(SimSpec { late: Some(seed), ..quick }));
    std::iter::once(Accelerator::sim(quick)).chain(late).collect()
}

fn tensor(allocator: &Allocator) -> Tensor {
    allocator.tensor(DType::F32, [4], Category::Data).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.read::<f32>().unwrap().to_vec()
}

/// A kernel: `x = factor * x`, in place.
fn scale(stream: &DeviceStream, x: &Tensor, factor: f32) -> Result<Event> {
    stream.launch("scale", Shapes::default(), |event| {
        let claim = x.queue(Access::Write, "scale", event)?;
        let (address, len) = (SendPtr(claim.base().as_ptr()), x.num_elems());
        let body: Body = Box::new(move || {
            // SAFETY: the range is queued for this work, and holds `len` elements of f32.
            let x = unsafe { std::slice::from_raw_parts_mut(address.get().cast::<f32>(), len) };
            x.iter_mut().for_each(|x| *x *= factor);
            Ok(())
        });
        Ok(body)
    })
}

#[test]
fn elements_are_copied_whatever_the_shape() {
    let allocator = Allocator::new();
    let from = allocator.tensor(DType::F32, [2, 2], Category::Data).unwrap();
    from.write::<f32>().unwrap().copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
    let to = allocator.tensor(DType::F32, [6], Category::Data).unwrap();
    to.fill_zero().unwrap();
    to.slice(1..5).unwrap().copy_from(&from).unwrap();
    assert_eq!(&*to.read::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 0.0]);
    assert!(matches!(to.copy_from(&from), Err(MemoryError::WrongShape { .. })));
    let ints = allocator.tensor(DType::I32, [4], Category::Data).unwrap();
    assert!(matches!(ints.copy_from(&from), Err(MemoryError::WrongType { .. })));
    let (upper, lower) = (to.slice(0..4).unwrap(), to.slice(2..6).unwrap());
    assert!(matches!(upper.copy_from(&lower), Err(MemoryError::Claimed { .. })));
}

#[test]
fn copies_and_kernels_run_in_the_order_of_their_streams_and_events() {
    for sim in devices() {
        let (compute, copy) = (sim.stream("compute").unwrap(), sim.stream("copy").unwrap());
        let (host, memory) = (Allocator::pinned(&sim), Allocator::on(&compute));
        let (from, there, back) = (tensor(&host), tensor(&memory), tensor(&host));
        from.write::<f32>().unwrap().copy_from_slice(&[1.0, 2.0, 3.0, 4.0]);
        let arrived = copy.copy(&from, &there).unwrap();
        compute.wait(&arrived);
        scale(&compute, &there, 10.0).unwrap();
        let scaled = scale(&compute, &there, 0.5).unwrap();
        copy.wait(&scaled);
        let read = copy.copy(&there, &back).unwrap();
        assert_eq!(read.wait(), EventState::Complete);
        assert_eq!(values(&back), [5.0, 10.0, 15.0, 20.0], "{sim:?}");
    }
}

#[test]
fn a_refused_launch_leaves_the_uses_before_it() {
    for sim in devices() {
        let (compute, copy) = (sim.stream("compute").unwrap(), sim.stream("copy").unwrap());
        let (pinned, memory) = (Allocator::pinned(&sim), Allocator::on(&compute));
        let (host, x, taken) = (tensor(&pinned), tensor(&memory), tensor(&memory));
        copy.copy(&x, &taken).unwrap();
        compute.wait(&copy.record());
        let scaled = scale(&compute, &x, 2.0).unwrap();
        let held = host.write::<f32>().unwrap();
        let refused = compute.copy(&x, &host).unwrap_err();
        assert!(matches!(refused, MemoryError::Claimed { .. }), "{refused}");
        let refused = compute.launch("refused", Shapes::default(), |event| {
            x.queue(Access::Write, "refused", event)?;
            host.queue(Access::Read, "refused", event)?;
            Ok(Box::new(|| Ok(())))
        });
        assert!(matches!(refused, Err(MemoryError::Claimed { .. })));
        drop(held);
        let error = copy.copy(&x, &host).unwrap_err();
        assert!(matches!(error, MemoryError::Unordered { op: "scale", .. }), "{error}");
        copy.wait(&scaled);
        copy.copy(&x, &host).unwrap().wait();
    }
}

#[test]
fn a_wait_that_is_missing_is_an_error_at_once() {
    for sim in devices() {
        let (compute, copy) = (sim.stream("compute").unwrap(), sim.stream("copy").unwrap());
        let (host, memory) = (Allocator::pinned(&sim), Allocator::on(&compute));
        let (from, there) = (tensor(&host), tensor(&memory));
        copy.copy(&from, &there).unwrap();
        // However long ago: the program has not said so.
        std::thread::sleep(Duration::from_millis(1));
        let error = scale(&compute, &there, 2.0).unwrap_err().to_string();
        let words = "bytes 0..16 are written by copy on the stream copy, and scale on the stream compute does not wait for \
                     it: let its stream wait for the event of copy";
        assert_eq!(error, words);
        // The staging memory is still read.
        let error = from.write::<f32>().unwrap_err().to_string();
        assert!(error.starts_with("bytes 0..16 are read by copy on the stream copy"), "{error}");
        assert!(from.read::<f32>().is_ok(), "both only read");
        // The refused work has left nothing in the stream.
        compute.wait(&copy.record());
        scale(&compute, &there, 2.0).unwrap();
        compute.synchronize().unwrap();
        assert!(
            from.write::<f32>().is_ok(),
            "a wait for work after the copy is a wait for the copy"
        );
    }
}

#[test]
fn the_host_cannot_reach_the_memory_of_the_device() {
    for sim in devices() {
        let there = tensor(&Allocator::on(&sim.stream("compute").unwrap()));
        let error = there.read::<f32>().unwrap_err().to_string();
        assert_eq!(
            error,
            "a tensor on the device sim cannot be read or written by the host; copy it to the host first"
        );
        assert!(there.write::<f32>().is_err());
        there.overwrite::<f32, _>(|x| x.fill(3.0)).unwrap();
        assert_eq!(values(&there.to_host().unwrap()), [3.0; 4]);
        there.fill_zero().unwrap();
        let other = tensor(there.buffer().allocator());
        other.copy_from(&there).unwrap();
        assert_eq!(values(&other.to_host().unwrap()), [0.0; 4]);
    }
}

#[test]
fn freed_memory_serves_the_same_stream_at_once_and_others_after_an_event() {
    for sim in devices() {
        let (compute, copy) = (sim.stream("compute").unwrap(), sim.stream("copy").unwrap());
        let (host, memory) = (Allocator::pinned(&sim), Allocator::on(&compute));
        let base = |of: &Buffer| of.claim(0..0, Access::Read, "look").unwrap().base();
        let first = tensor(&memory);
        let place = base(first.buffer());
        scale(&compute, &first, 2.0).unwrap();
        drop(first);
        let second = tensor(&memory);
        assert_eq!(base(second.buffer()), place, "the work that still uses it comes first anyway");
        // The copy stream uses it last, and the compute stream does not wait for that.
        compute.wait(&copy.record());
        copy.wait(&compute.record());
        copy.copy(&tensor(&host), &second).unwrap();
        drop(second);
        let third = tensor(&memory);
        assert_ne!(base(third.buffer()), place);
        compute.wait(&copy.record());
        let fourth = tensor(&memory);
        assert_eq!(base(fourth.buffer()), place);
    }
}

#[test]
fn in_the_late_mode_nothing_runs_before_a_wait_and_then_only_what_comes_before_it() {
    let sim = Accelerator::sim(SimSpec::late(3));
    let (one, two) = (sim.stream("one").unwrap(), sim.stream("two").unwrap());
    let (host, memory) = (Allocator::pinned(&sim), Allocator::on(&one));
    let (a, b) = (tensor(&host), tensor(&host));
    let (on_one, on_two) = (tensor(&memory), tensor(&Allocator::on(&two)));
    let first = one.copy(&a, &on_one).unwrap();
    let second = two.copy(&b, &on_two).unwrap();
    let third = one.copy(&on_one, &a).unwrap();
    std::thread::sleep(Duration::from_millis(1));
    assert_eq!(first.state(), EventState::Pending);
    assert_eq!(first.wait(), EventState::Complete);
    assert_eq!((second.state(), third.state()), (EventState::Pending, EventState::Pending));
    assert_eq!(third.wait(), EventState::Complete);
    assert_eq!(second.state(), EventState::Pending);
}

#[test]
fn the_order_follows_from_the_seed() {
    // Eight streams write their numbers into memory that the program has not divided among them.
    let order = |seed: u64| {
        let sim = Accelerator::sim(SimSpec::late(seed));
        let log = Arc::new(Mutex::new(Vec::new()));
        let last = sim.stream("last").unwrap();
        for number in 0..8 {
            let (stream, log) = (sim.stream("one of many").unwrap(), log.clone());
            let event = stream.launch("log", Shapes::default(), |_| {
                let body: Body = Box::new(move || {
                    log.lock().unwrap().push(number);
                    Ok(())
                });
                Ok::<_, MemoryError>(body)
            });
            last.wait(&event.unwrap());
        }
        let nothing: Body = Box::new(|| Ok(()));
        last.launch("nothing", Shapes::default(), |_| Ok::<_, MemoryError>(nothing))
            .unwrap()
            .wait();
        log.lock().unwrap().clone()
    };
    let orders: Vec<Vec<u32>> = (0..20).map(order).collect();
    assert_eq!(order(5), orders[5]);
    let different = orders.iter().filter(|of| **of != orders[0]).count();
    assert!(different > 10, "{orders:?}");
    assert!(orders.iter().all(|of| (0..8).all(|number| of.contains(&number))));
}

#[test]
fn freed_memory_is_overwritten_in_the_late_mode() {
    let sim = Accelerator::sim(SimSpec::late(1));
    let compute = sim.stream("compute").unwrap();
    let (host, memory) = (Allocator::pinned(&sim), Allocator::on(&compute));
    let (from, back) = (tensor(&host), tensor(&host));
    from.write::<f32>().unwrap().fill(1.0);
    let there = tensor(&memory);
    compute.copy(&from, &there).unwrap();
    drop(there);
    let again = tensor(&memory);
    compute.copy(&again, &back).unwrap().wait();
    assert!(values(&back).iter().all(|x| x.is_nan()), "{:?}", values(&back));
}

#[test]
fn copies_take_their_time_and_pageable_ones_that_of_the_host() {
    // 1 MiB at 100 MB/s takes 10 ms, pageable 20 ms.
    let spec = SimSpec { copy_bytes_per_s: 1e8, launch: Duration::ZERO, ..SimSpec::DEFAULT };
    let sim = Accelerator::sim(spec);
    let copy = sim.stream("copy").unwrap();
    let memory = Allocator::on(&copy);
    for (host, ms, waits) in [(Allocator::pinned(&sim), 10, false), (Allocator::new(), 20, true)] {
        let [from, to] = [&host, &memory]
            .map(|allocator| allocator.tensor(DType::U8, [1 << 20], Category::Data).unwrap());
        let started = std::time::Instant::now();
        let event = copy.copy(&from, &to).unwrap();
        // It cannot be done before its time has passed; how much later is up to the machine.
        assert!(!waits || event.peek() == EventState::Complete);
        event.wait();
        let took = started.elapsed();
        assert!(took >= Duration::from_millis(ms), "{took:?}");
    }
}

#[test]
fn a_failure_is_returned_by_the_next_synchronization_and_stops_the_device() {
    for sim in devices() {
        let compute = sim.stream("compute").unwrap();
        let memory = Allocator::on(&compute);
        let there = tensor(&memory);
        for failure in [false, true] {
            let body: Body = Box::new(move || {
                if failure { Err("index 7 is not among 4 elements".into()) } else { Ok(()) }
            });
            compute.launch("work", Shapes::default(), |_| Ok::<_, MemoryError>(body)).unwrap();
        }
        let error = compute.synchronize().unwrap_err().to_string();
        let words = "work on the device has failed: index 7 is not among 4 elements";
        assert_eq!(error, words);
        assert_eq!(scale(&compute, &there, 2.0).unwrap_err().to_string(), words);
    }
    let sim = Accelerator::sim(SimSpec::late(0));
    let compute = sim.stream("compute").unwrap();
    let body: Body = Box::new(|| panic!("a bug"));
    compute.launch("work", Shapes::default(), |_| Ok::<_, MemoryError>(body)).unwrap();
    let error = compute.synchronize().unwrap_err().to_string();
    assert!(error.ends_with("a kernel panicked: a bug"), "{error}");
}
