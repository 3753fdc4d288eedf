//! The best bucket size by theory beside the best measured one.
//!
//! The size by theory is known when the other runs are done, so both are run again, in turns, unless the size by theory
//! makes the same buckets as a size that has been measured.

use paceline_failure::Result;
use serde::Serialize;

use super::theory::Theory;
use super::{Planner, Row};
use crate::study::{StudyArgs, run_all};

/// The folder of these runs within the folder of the study.
const FOLDER: &str = "best-size";

/// The two sizes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SideBySide {
    /// The size by theory in MiB, as it was run.
    pub theory_mb: f64,
    /// The measured size that makes the same buckets, if there is one.
    pub same_as_mb: Option<f64>,
    /// The results of the size by theory.
    pub theory: Row,
    /// The results of the best measured size.
    pub measured: Row,
    /// Whether the two rows differ by more than noise.
    pub differs: bool,
}

impl SideBySide {
    /// Measures the size by theory; `None` without such a size.
    pub(super) fn measure(
        study: &StudyArgs,
        planner: &Planner,
        rows: &[Row],
        theory: &Theory,
    ) -> Result<Option<Self>> {
        let (Theory::Found { best_mb, .. }, Some(best)) = (theory, measured(rows)) else {
            return Ok(None);
        };
        let Some(measured_mb) = best.bucket_mb() else { return Ok(None) };
        let theory_mb = runnable(*best_mb);
        let buckets = planner.begins(theory_mb);
        let is_same = |row: &&Row| row.bucket_mb().is_some_and(|mb| planner.begins(mb) == buckets);
        // The measured best counts first, so that no other row with the same buckets stands beside it.
        let same = std::iter::once(best).chain(rows).find(is_same);
        let (theory, measured) = match same {
            Some(row) => (row.clone(), best.clone()),
            None => {
                let planned = vec![planner.bucketed(theory_mb)?, planner.bucketed(measured_mb)?];
                let folder = study.output.as_ref().map(|folder| folder.join(FOLDER));
                let cases = run_all(study, folder.as_deref(), planned)?;
                (Row::of(&cases[0])?, Row::of(&cases[1])?)
            }
        };
        let differs = theory.times.step.differs_from(&measured.times.step);
        let same_as_mb = same.and_then(Row::bucket_mb);
        Ok(Some(Self { theory_mb, same_as_mb, theory, measured, differs }))
    }
}

/// The measured size with the shortest step.
pub fn measured(rows: &[Row]) -> Option<&Row> {
    let bucketed = rows.iter().filter(|row| row.buckets.is_some());
    bucketed.min_by(|a, b| a.times.step.median.total_cmp(&b.times.step.median))
}

/// The size with four decimals, as a person would type it. The smallest one holds every parameter alone.
fn runnable(mb: f64) -> f64 {
    ((mb * 1e4).round() / 1e4).max(1e-4)
}

#[cfg(test)]
mod tests {
    use super::super::tests::rows;
    use super::*;

    #[test]
    fn the_best_size_is_one_of_the_sizes() {
        let rows = rows(&[(1.0, 14, 15.0), (10.0, 3, 13.0), (100.0, 1, 16.0)]);
        assert_eq!(measured(&rows).unwrap().bucket_mb(), Some(10.0));
        assert_eq!(measured(&rows[..3]), None);
        assert_eq!((runnable(1.234_567), runnable(1e-9)), (1.2346, 1e-4));
    }
}
