//! The table of modules: where the difference begins, and how it grows from one moment to the next.

use std::collections::HashSet;

use paceline_files::printable;
use paceline_table::table::{Cell, Head, Table};

use super::{Moment, PairOutcome, TensorPair};

/// The most rows, and levels of a name: a file may have any number of both.
const MOST_ROWS: usize = 1000;
const MOST_LEVELS: usize = 16;

/// A row per module, in the order of computation, and a column per moment. Only the modules above the first difference are opened, unless all are.
pub(super) fn table(moments: &[Moment], is_open: bool) -> Table {
    let first = moments[0].tensors.iter().find(|of| of.differs()).map_or("", |of| &*of.name);
    let (mut rows, mut known) = (Vec::new(), HashSet::new());
    for name in moments.iter().flat_map(|moment| &moment.tensors).map(|of| &*of.name) {
        let ends = name.match_indices('.').map(|(at, _)| at).take(MOST_LEVELS);
        for end in ends.chain([name.len()]) {
            let (row, above) = (&name[..end], name[..end].rfind('.').map_or("", |at| &name[..at]));
            if (is_open || is_within(first, above)) && known.insert(row) {
                rows.push(row);
            }
        }
    }
    let num_left_out = rows.len().saturating_sub(MOST_ROWS);
    rows.truncate(MOST_ROWS);
    let mut columns = vec![Head::plain("module"), Head::plain("tensors")];
    columns.extend(moments.iter().map(|moment| Head::plain(printable(&moment.label).into_owned())));
    let cells = |row: &&str| {
        let depth = row.matches('.').take(MOST_LEVELS).count();
        let own = row.rsplit('.').next().unwrap_or(row);
        let count = moments.iter().map(|moment| within(moment, row).count()).max().unwrap_or(0);
        let mut cells: Vec<Cell> =
            vec![format!("{}{}", "  ".repeat(depth), printable(own)).into(), count.into()];
        cells.extend(moments.iter().map(|moment| Cell::from(shown(moment, row))));
        cells
    };
    let mut rows: Vec<Vec<Cell>> = rows.iter().map(cells).collect();
    if num_left_out > 0 {
        let words = format!("and {num_left_out} more");
        rows.push(
            std::iter::once(words.into()).chain(columns[1..].iter().map(|_| "".into())).collect(),
        );
    }
    Table { columns, rows, mean: None }
}

fn is_within(name: &str, module: &str) -> bool {
    module.is_empty()
        || name.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn within<'a>(moment: &'a Moment, module: &'a str) -> impl Iterator<Item = &'a TensorPair> {
    moment.tensors.iter().filter(move |of| is_within(&of.name, module))
}

/// The findings in a module: how many of its tensors differ, and the largest relative difference.
fn shown(moment: &Moment, module: &str) -> String {
    if within(moment, module).next().is_none() {
        return String::new();
    }
    let (mut count, mut largest, mut is_other, mut is_finite) = (0, 0.0f64, false, true);
    for of in within(moment, module) {
        match &of.outcome {
            PairOutcome::Same => continue,
            PairOutcome::Differs(of) => {
                largest = largest.max(of.relative);
                is_finite &= of.not_finite == [0; 2];
            }
            PairOutcome::Other(_) => is_other = true,
            PairOutcome::Digests(_) => largest = f64::NAN,
        }
        count += 1;
    }
    match (count, is_other) {
        (0, _) => "same".to_owned(),
        (_, true) => format!("{count}: other tensors"),
        _ if !is_finite => format!("{count}: not finite"),
        _ if largest.is_nan() => format!("{count} differ"),
        _ => format!("{count}: {largest:.1e}"),
    }
}
