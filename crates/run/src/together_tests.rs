//! Work that ranks do together: slow, failed, late.

use std::time::Duration;

use paceline_collectives::{Group, GroupOptions};
use paceline_failure::{Failure, Result};

use crate::together::together;

/// The results of two ranks whose operations may take a second, and whose work takes this long.
fn outcomes(work: [(Duration, bool); 2], limit: Duration) -> Vec<Result<usize>> {
    let timeout = Duration::from_secs(1);
    let options = GroupOptions { timeout, ..GroupOptions::for_local_ranks(2) };
    let groups = Group::threads_with(2, options).unwrap();
    std::thread::scope(|scope| {
        let ranks = groups.into_iter().zip(work).map(|(world, (time, is_good))| {
            scope.spawn(move || {
                together(&world, "write its part", limit, || {
                    std::thread::sleep(time);
                    let own = world.rank();
                    is_good.then_some(own).ok_or_else(|| Failure::Run("no space".into()))
                })
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

const LONG: Duration = Duration::from_millis(2500);
const LIMIT: Duration = Duration::from_secs(600);

#[test]
fn work_may_take_longer_than_an_operation() {
    for slow in [0, 1] {
        let mut work = [(Duration::ZERO, true); 2];
        work[slow].0 = LONG;
        let found = outcomes(work, LIMIT);
        assert!(matches!(found[..], [Ok(0), Ok(1)]), "{slow}: {found:?}");
    }
}

#[test]
fn all_ranks_learn_that_one_has_failed() {
    let found = outcomes([(Duration::ZERO, true), (Duration::ZERO, false)], LIMIT);
    assert!(matches!(&found[1], Err(Failure::Run(text)) if text == "no space"), "{found:?}");
    let said = found[0].as_ref().unwrap_err().to_string();
    assert_eq!(said, "rank 1 cannot write its part");
}

#[test]
fn work_that_panics_has_failed() {
    let groups = Group::threads_with(2, GroupOptions::for_local_ranks(2)).unwrap();
    let ranks = groups.into_iter().map(|world| {
        std::thread::spawn(move || {
            together(&world, "read", LIMIT, || match world.rank() {
                0 => Ok(()),
                _ => panic!("a mistake"),
            })
        })
    });
    let ranks: Vec<_> = ranks.collect();
    let found: Vec<_> = ranks.into_iter().map(|rank| rank.join()).collect();
    let said = found[0].as_ref().unwrap().as_ref().unwrap_err().to_string();
    assert_eq!(said, "rank 1 cannot read");
    assert!(found[1].is_err(), "the panic goes on");
}

#[test]
fn work_has_a_limit_of_its_own_which_the_error_states() {
    let found = outcomes([(Duration::ZERO, true), (LONG, true)], Duration::from_millis(500));
    for (rank, outcome) in found.iter().enumerate() {
        let Err(Failure::Missing { message, ranks }) = outcome else { panic!("{found:?}") };
        assert_eq!(ranks, &[1]);
        let words = format!("rank {rank}: rank 1 does not write its part within 0.5 s, the limit");
        assert!(message.contains(&words), "{message}");
    }
}
