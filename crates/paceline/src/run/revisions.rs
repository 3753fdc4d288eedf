//! Whether all ranks have found the same files for the names of models and data sets.
//!
//! Each rank looks names up itself. Hosts have caches of their own, and a fetch may end between two look-ups. This file
//! does not know how a name is looked up.

use crate::{Failure, Result};

/// Fails unless all ranks have found the same revisions: those of each rank, in words.
pub fn check(of_ranks: &[Vec<String>]) -> Result<()> {
    let Some((first, others)) = of_ranks.split_first() else { return Ok(()) };
    let Some(at) = others.iter().position(|of_rank| of_rank != first) else { return Ok(()) };
    let words = |of_rank: &[String]| match of_rank {
        [] => "no names, but folders".to_owned(),
        all => all.join(", "),
    };
    Err(Failure::Run(format!(
        "rank {} has found {}, and rank 0 {}; fetch the same revision on all hosts, or state a commit: OWNER/NAME@COMMIT",
        at + 1,
        words(&others[at]),
        words(first)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rank_that_differs_is_named() {
        let of = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        check(&[]).unwrap();
        check(&[of(&["a (commit 1)"]), of(&["a (commit 1)"])]).unwrap();
        let error = check(&[of(&["a (commit 1)"]), of(&["a (commit 1)"]), of(&["a (commit 2)"])]);
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("rank 2 has found a (commit 2), and rank 0 a (commit 1); fetch"),
            "{error}"
        );
        let error = check(&[of(&["a (commit 1)"]), of(&[])]).unwrap_err().to_string();
        assert!(error.starts_with("rank 1 has found no names, but folders, and rank 0"), "{error}");
    }
}
