//! The `thread` transport.

use crate::limit;

use std::time::Duration;

use crate::common::{self, private, read};
use crate::ranks::each;
use paceline_collectives::{CollectiveError, Group, GroupOptions, Link, Purpose, ReduceOp};
use paceline_memory::{Allocator, Category, DType, EventState};

fn on_ranks<R: Send>(world: usize, body: impl Fn(Group) -> R + Sync) -> Vec<R> {
    each(Group::threads(world), body)
}

#[test]
fn every_operation_at_every_world_size() {
    for world in [1, 2, 3, 4, 5, 6, 7, 8, 15] {
        on_ranks(world, |group| {
            common::every_type(&group);
            common::objects(&group);
        });
    }
}

#[test]
fn the_example_that_is_the_whole_of_training_learns_with_any_number_of_ranks() {
    let test = std::env::current_exe().unwrap();
    let example = test.parent().unwrap().parent().unwrap().join("examples/whole");
    assert!(example.is_file(), "`cargo test -p paceline-collectives` builds {}", example.display());
    let ended = std::process::Command::new(example).output().unwrap();
    let text = String::from_utf8(ended.stdout).unwrap();
    // It ends with an error if the copies of the ranks differ.
    assert!(ended.status.success(), "{text}{}", String::from_utf8_lossy(&ended.stderr));
    let accuracies = text.lines().map(|line| line.split_once("accuracy ").unwrap().1);
    let accuracies: Vec<f64> = accuracies.map(|of| of.parse().unwrap()).collect();
    assert_eq!(accuracies.len(), 3, "{text}");
    assert!(accuracies.iter().all(|of| *of > 0.9), "{text}");
}

#[test]
fn every_operation_on_seventy_ranks() {
    on_ranks(70, |group| common::every_operation::<i32>(&group));
}

#[test]
fn a_message_right_after_a_barrier_is_no_conflict() {
    // The receiver may not have noticed that the barrier is over when the message becomes visible.
    on_ranks(3, |group| {
        let mut word = [0i64];
        for round in 0..20_000 {
            group.barrier().unwrap();
            match group.rank() {
                0 => {
                    group.recv_slice(&mut word, 2).unwrap();
                    assert_eq!(word, [round]);
                }
                2 => {
                    group.send_slice(&[round], 0).unwrap();
                }
                _ => {}
            }
        }
        group.barrier().unwrap();
    });
}

#[test]
fn groups_divide() {
    for world in [1, 2, 3, 5, 8] {
        on_ranks(world, |group| common::groups_divide(&group));
    }
    on_ranks(3, |group| common::messages_of_two_pairs(&group));
}

#[test]
fn operations_keep_their_order() {
    for world in [2, 3, 5] {
        on_ranks(world, |group| common::operations_keep_their_order(&group));
    }
}

#[test]
fn sums_of_two_and_three_ranks_are_in_rank_order() {
    for world in [2, 3] {
        for got in on_ranks(world, |group| common::order_sensitive_sums(&group)) {
            for (i, bits) in got.iter().enumerate().take(5000) {
                let mut sum = 0.0f32;
                for rank in 0..world {
                    let x = ((i * 37 + rank * 101) % 1009) as f32 * 0.1;
                    sum = if rank == 0 { x } else { sum + x };
                }
                assert_eq!(*bits, (sum / world as f32).to_bits());
            }
        }
    }
}

#[test]
fn maximum_passes_nan_on() {
    let seen = on_ranks(3, |group| {
        let mut x = [if group.rank() == 1 { f32::NAN } else { 1.0 }, group.rank() as f32];
        group.all_reduce_slice(&mut x, ReduceOp::Max).unwrap();
        x
    });
    assert!(seen.iter().all(|x| x[0].is_nan() && x[1] == 2.0));
}

#[test]
fn a_claimed_bucket_cannot_be_touched() {
    let mut groups = Group::threads(2);
    let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
    let allocator = Allocator::new();
    let tensor = allocator.tensor(DType::F32, [8], Category::Gradients).unwrap();
    tensor.write::<f32>().unwrap().fill(1.0);
    let work = first.all_reduce_async(&tensor, ReduceOp::Sum).unwrap();
    let error = tensor.slice(2..3).unwrap().write::<f32>().unwrap_err().to_string();
    assert!(error.contains("written by all_reduce on the stream world"), "{error}");
    second.all_reduce_slice(&mut [2.0f32; 8], ReduceOp::Sum).unwrap();
    work.wait().unwrap();
    assert_eq!(*tensor.read::<f32>().unwrap(), [3.0; 8]);
}

#[test]
fn a_refused_operation_leaves_the_uses_before_it() {
    let mut groups = Group::threads(2);
    let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
    let allocator = Allocator::new();
    let [own, gathered, scattered] =
        [8, 16, 4].map(|len| allocator.tensor(DType::F32, [len], Category::Gradients).unwrap());
    let work = first.all_gather_async(&own, &gathered).unwrap();
    let held = scattered.write::<f32>().unwrap();
    let refused = first.reduce_scatter_async(&own, &scattered, ReduceOp::Sum).unwrap_err();
    assert!(refused.to_string().contains("claimed"), "{refused}");
    drop(held);
    let error = own.write::<f32>().unwrap_err().to_string();
    assert!(error.contains("all_gather"), "{error}");
    second.all_gather_slice(&[1.0f32; 8], &mut [0.0; 16]).unwrap();
    work.wait().unwrap();
    assert!(own.write::<f32>().is_ok());
}

#[test]
fn whoever_has_waited_for_a_work_may_use_its_memory_and_that_of_a_failed_one_is_fenced() {
    let mut groups = Group::threads(2);
    let (second, first) = (groups.pop().unwrap(), groups.pop().unwrap());
    let allocator = Allocator::new();
    let [data, gathered] = [4, 8].map(|len| {
        let tensor = allocator.tensor(DType::F32, [len], Category::Gradients).unwrap();
        tensor.fill_zero().unwrap();
        tensor
    });
    // Both sides of an operation are claimed, also when nobody keeps the work.
    let work = first.all_gather_async(&data, &gathered).unwrap();
    let event = work.event().clone();
    drop(work);
    assert_eq!(event.state(), EventState::Pending);
    assert!(data.write::<f32>().is_err() && gathered.read::<f32>().is_err());
    assert!(data.read::<f32>().is_ok(), "it is only read");
    let mut all = [0.0f32; 8];
    second.all_gather_slice(&[1.0f32; 4], &mut all).unwrap();
    assert_eq!(event.wait(), EventState::Complete);
    assert!(data.write::<f32>().is_ok() && gathered.read::<f32>().is_ok());

    let work = first.all_reduce_async(&data, ReduceOp::Sum).unwrap();
    let event = work.event().clone();
    drop(second);
    assert!(matches!(work.wait().unwrap_err(), CollectiveError::PeerLeft { .. }));
    assert_eq!(event.state(), EventState::Failed);
    let error = data.read::<f32>().unwrap_err().to_string();
    assert!(error.contains("may still be written by all_reduce on the stream world"), "{error}");
    // The only peer has left the group.
    first.give_back_failed().unwrap();
    assert!(data.write::<f32>().is_ok());
}

#[test]
fn the_memory_of_a_failed_operation_is_given_back_once_all_others_have_left() {
    let options =
        GroupOptions { timeout: Duration::from_millis(200), ..GroupOptions::for_local_ranks(3) };
    let mut groups = Group::threads_with(3, options).unwrap();
    let (third, second, first) = (groups.pop().unwrap(), groups.pop().unwrap(), groups.remove(0));
    let allocator = Allocator::new();
    let data = allocator.tensor(DType::F32, [8], Category::Gradients).unwrap();
    let kept = allocator.tensor(DType::F32, [8], Category::Gradients).unwrap();
    let work = first.all_reduce_async(&data, ReduceOp::Sum).unwrap();
    drop(third);
    work.wait().unwrap_err();
    // A blocking one fails at once, since the group is broken.
    first.all_reduce(&kept, ReduceOp::Sum).unwrap_err();
    let error = first.give_back_failed().unwrap_err();
    assert!(matches!(&error, CollectiveError::StillThere { rank: 0, peers, .. } if *peers == [1]));
    assert!(error.to_string().contains("ranks [1] have not left the group"), "{error}");
    assert!(data.read::<f32>().is_err() && kept.read::<f32>().is_err());
    drop(second);
    first.give_back_failed().unwrap();
    assert!(data.write::<f32>().is_ok() && kept.write::<f32>().is_ok());
    first.give_back_failed().unwrap();
    drop((data, kept));
    assert_eq!(allocator.total().current_bytes, 0, "nothing is kept");
}

#[test]
fn different_calls_are_an_error_on_every_rank() {
    let errors = on_ranks(3, |group| {
        let mut x = [0.0f32; 12];
        let len = if group.rank() == 1 { 10 } else { 12 };
        group.all_reduce_slice(&mut x[..len], ReduceOp::Sum).unwrap_err()
    });
    let [zero, one] = [12, 10].map(|len| format!("called all_reduce(f32, {len}, sum) as #0"));
    for (rank, error) in errors.into_iter().enumerate() {
        // A rank's own call comes first, if it is one of the two.
        let want = match rank {
            1 => format!("the ranks disagree: rank 1 {one}, rank 0 {zero}"),
            _ => format!("the ranks disagree: rank 0 {zero}, rank 1 {one}"),
        };
        assert_eq!(error.to_string(), want);
    }
}

#[test]
fn a_rank_that_leaves_is_named_and_the_group_stays_broken() {
    on_ranks(3, |group| {
        group.barrier().unwrap();
        if group.rank() == 2 {
            return;
        }
        let error = group.barrier().unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLeft { .. }), "{error}");
        assert!(matches!(group.barrier().unwrap_err(), CollectiveError::Broken { .. }));
    });
}

#[test]
fn a_rank_that_leaves_ends_only_the_operations_that_need_it() {
    let mut groups = Group::threads(3);
    drop(groups.pop());
    each(groups, |group| {
        let (rank, other) = (group.rank(), 1 - group.rank());
        let (data, mut got) = ([rank as f32; 1000], [9f32; 1000]);
        let received = private(&got);
        group.send_recv(&private(&data), other, &received, other).unwrap();
        assert_eq!(read::<f32>(&received), [other as f32; 1000]);
        match rank {
            0 => group.send_slice(&data, 1).map(|_| ()).unwrap(),
            _ => group.recv_slice(&mut got, 0).map(|_| ()).unwrap(),
        }
        let error = group.recv_slice(&mut got, 2).unwrap_err();
        assert!(matches!(error, CollectiveError::PeerLeft { peer: 2, .. }), "{error}");
    });
}

#[test]
fn messages_that_do_not_fit_are_named_though_another_rank_has_left() {
    let mut groups = Group::threads(3);
    drop(groups.pop());
    each(groups, |group| {
        let error = match group.rank() {
            0 => group.send_slice(&[1f32; 10], 1).unwrap_err(),
            _ => group.recv_slice(&mut [1f32; 9], 0).unwrap_err(),
        };
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
    });
}

#[test]
fn the_time_limit_names_who_is_missing() {
    let timeout = Duration::from_millis(50);
    let groups =
        Group::threads_with(3, GroupOptions { timeout, ..GroupOptions::for_local_ranks(3) })
            .unwrap();
    let error = groups[0].barrier().unwrap_err();
    let CollectiveError::TimedOut { missing, op: "barrier", .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(missing, &[1, 2]);
}

#[test]
fn an_emulated_link_takes_its_time() {
    let link: Link = "80mbit,1ms".parse().unwrap();
    let times = on_ranks(2, |group| {
        group.emulate(link).unwrap();
        let mut x = vec![1.0f32; 25_000];
        let times = group.all_reduce_slice(&mut x, ReduceOp::Sum).unwrap();
        assert!(x.iter().all(|x| *x == 2.0));
        let half = group.split(Some(0)).unwrap().unwrap();
        assert_eq!(half.link(), Some(link));
        times
    });
    // Three steps of a millisecond, and 100 KB at 10 MB/s.
    for times in times {
        assert!(times.move_ns() >= 13_000_000, "{times:?}");
    }
}

#[test]
fn a_link_that_cannot_be_is_refused() {
    for (bytes_per_s, latency_s) in [(0.0, 1e-6), (-1.0, 0.0), (f64::NAN, 0.0), (1e9, -1.0)] {
        let link = Link { bytes_per_s, latency_s };
        let error = Group::single().unwrap().emulate(link).unwrap_err();
        assert!(matches!(error, CollectiveError::ImpossibleLink { .. }), "{error}");
    }
}

#[test]
fn no_time_limit_is_too_long() {
    let forever = Duration::MAX;
    let options = GroupOptions { timeout: forever, ..GroupOptions::for_local_ranks(2) };
    let spinning = GroupOptions { spin: forever, ..options.clone() };
    for options in [options, spinning] {
        limit::within_limit(|| {
            each(Group::threads_with(2, options).unwrap(), |group| {
                let (rank, other) = (group.rank(), 1 - group.rank());
                let received = private(&[9f32; 3]);
                group.send_recv(&private(&[rank as f32; 3]), other, &received, other).unwrap();
                assert_eq!(read::<f32>(&received), [other as f32; 3]);
                group.barrier().unwrap();
            });
        });
    }
}

#[test]
fn a_link_that_is_too_fast_is_refused() {
    for error in on_ranks(2, |group| group.emulate("nvlink4".parse().unwrap()).unwrap_err()) {
        assert!(matches!(error, CollectiveError::Link { .. }), "{error}");
        assert!(error.to_string().contains("at least 1.25 times as slow"), "{error}");
    }
}

#[test]
fn roots_must_exist() {
    let group = Group::single().unwrap();
    let labels = Allocator::new().tensor(DType::I64, [3], Category::Data).unwrap();
    assert!(matches!(group.broadcast(&labels, 1), Err(CollectiveError::NoSuchRank { .. })));
}

/// Rank 1 has all that it gets from rank 0, which still waits for rank 2, which waits for rank 3.
#[test]
fn a_peer_whose_half_is_done_may_leave_while_the_other_half_goes_on() {
    let mut groups = Group::threads(4).into_iter();
    let mut next = || groups.next().unwrap();
    let (zero, one, two, three) = (next(), next(), next(), next());
    let (left, has_left) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let received = private(&[0f32; 3]);
            zero.send_recv(&private(&[1f32; 3]), 1, &received, 2).unwrap();
            assert_eq!(read::<f32>(&received), [2.0; 3]);
        });
        scope.spawn(move || {
            let mut received = [0f32; 3];
            one.recv_slice(&mut received, 0).unwrap();
            drop(one);
            left.send(()).unwrap();
        });
        scope.spawn(move || {
            two.send_recv(&private(&[2f32; 3]), 0, &private(&[0f32; 3]), 3).unwrap();
        });
        scope.spawn(move || {
            has_left.recv().unwrap();
            // Rank 0 learns meanwhile that rank 1 has left.
            std::thread::sleep(Duration::from_millis(200));
            three.send_slice(&[3.0f32; 3], 2).unwrap();
        });
    });
}

/// The purpose of an operation is neither that of another group nor that of an operation that was refused.
#[test]
fn a_purpose_is_that_of_its_own_operation() {
    let world = Group::threads(1).pop().unwrap();
    let half = world.split(Some(0)).unwrap().unwrap();
    let data = Allocator::new().tensor(DType::F32, [4], Category::Gradients).unwrap();
    world.fresh_records(&mut Vec::new());
    world.for_purpose(Purpose::Loss).reduce(&data, ReduceOp::Sum, 1).unwrap_err();
    let of_bucket = world.for_purpose(Purpose::Bucket(3));
    half.barrier().unwrap();
    of_bucket.all_reduce(&data, ReduceOp::Sum).unwrap();
    of_bucket.all_reduce_async(&data, ReduceOp::Sum).unwrap().wait().unwrap();
    world.barrier().unwrap();
    let mut records = Vec::new();
    world.fresh_records(&mut records);
    let purposes: Vec<Purpose> = records.iter().map(|record| record.purpose).collect();
    assert_eq!(purposes, [Purpose::Other, Purpose::Bucket(3), Purpose::Bucket(3), Purpose::Other]);
}
