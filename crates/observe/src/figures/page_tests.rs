//! The table in `docs/metrics.md` is the table of figures.

use std::path::Path;

use crate::figures::figure::{Compared, Figure};
use crate::figures::table::TABLE;
use crate::record::ranks::Ranks;

/// If this variable is set, the test writes the table instead of comparing it.
const WRITE: &str = "PACELINE_WRITE_DOCS";
/// The head of the table. The page above it is not made from the figures.
const HEAD: &str = "| figure | definition | ranks | shown in |\n|---|---|---|---|\n";

/// The names of all views that show a figure.
pub(super) fn views(figure: &Figure) -> Vec<String> {
    let all = [
        ("console".to_owned(), figure.on_console),
        ("metrics.jsonl".to_owned(), figure.in_metrics),
        ("summary.json".to_owned(), figure.in_summary),
        (format!("TensorBoard as `{}`", figure.curve.unwrap_or_default()), figure.curve.is_some()),
        ("comparison".to_owned(), figure.compared != Compared::No),
        ("sweep".to_owned(), figure.swept.is_some()),
    ];
    all.into_iter().filter(|(_, is_shown)| *is_shown).map(|(name, _)| name).collect()
}

/// The rule by which a figure combines ranks, as text.
fn words(rule: Ranks) -> &'static str {
    match rule {
        Ranks::First => "rank 0",
        Ranks::Same => "the same on all",
        Ranks::Mean => "mean",
        Ranks::MeanOfSamples => "mean over the samples of all ranks",
        Ranks::SlowestOfStep => "slowest of each step",
        Ranks::SlowestRank => "the rank that takes longest",
        Ranks::Max => "maximum",
        Ranks::Sum => "sum",
        Ranks::Each => "each rank",
    }
}

fn row(figure: &Figure) -> String {
    let Figure { name, definition, unit, .. } = figure;
    let unit = if unit.is_empty() { String::new() } else { format!(" ({unit})") };
    let (ranks, views) = (words(figure.ranks), views(figure).join(", "));
    format!("| `{name}`{unit} | {definition} | {ranks} | {views} |\n")
}

#[test]
fn the_page_is_that_of_the_table() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    let found = std::fs::read_to_string(&path).unwrap();
    let (above, _) = found.split_once(HEAD).unwrap();
    let page = format!("{above}{HEAD}{}", TABLE.iter().map(row).collect::<String>());
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, page).unwrap();
        return;
    }
    assert!(
        found == page,
        "docs/metrics.md is not what the table of figures says; write it again with\n    {WRITE}=1 cargo \
         test -p paceline-observe --lib the_page_is_that_of_the_table"
    );
}
