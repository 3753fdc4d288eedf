//! A grid: what each value of a varied flag does, and whether it still does so when another flag is changed.
//!
//! The rows of a study whose cases are all combinations of the values go in. A pair of rows that differ in one flag gives one
//! ratio in each round.

use paceline_observe::figures::figure::Better;
use paceline_table::table::{Cell, Columns};

use crate::cases::Vary;
use crate::noise::{self, Effect, logarithms};
use crate::outcome::Outcome;
use crate::report::{Found, tabled};

/// The effects of all values but the first ones on a figure, over all pairs of rows that differ in nothing else.
pub fn effects(vary: &[Vary], outcome: &Outcome, figure: &str) -> Found {
    let mut rows = Vec::new();
    for (at, of) in vary.iter().enumerate() {
        let Some((beside, others)) = of.alternatives.split_first() else { continue };
        for value in others {
            let pairs = pairs(outcome, figure, at, [beside, value]);
            let rounds = pairs.iter().map(Vec::len).min().unwrap_or(0);
            let mean = |round: usize| {
                pairs.iter().map(|pair| pair[round]).sum::<f64>() / pairs.len() as f64
            };
            let effect = Effect::of_logarithms(&(0..rounds).map(mean).collect::<Vec<f64>>());
            let differs =
                |pair: &&Vec<f64>| Effect::of_logarithms(pair).is_some_and(|of| !of.is_none());
            let words = [&of.key, value, beside].map(String::clone);
            rows.push((words, effect, [pairs.len(), pairs.iter().filter(differs).count()]));
        }
    }
    type Row = ([String; 3], Option<Effect>, [usize; 2]);
    let plain = ("", 0);
    let table = Columns::new()
        .add("key", "setting", plain, "", |of: &Row| of.0[0].clone())
        .add("value", "value", plain, "", |of| of.0[1].clone())
        .add("beside", "beside", plain, "", |of| of.0[2].clone())
        .add("effect", "effect", plain, "", |of| noise::words(of.1))
        .add("ratio", "", plain, "", |of| of.1.map(|of| of.ratio))
        .add("pairs", "pairs", plain, "", |of| of.2[0])
        .add("pairs_that_differ", "that differ", plain, "", |of| of.2[1])
        .table(&rows);
    let definition = "Each value beside the first one that was given for the setting: the mean over all pairs of cases that differ in \
                      nothing else, and how many of them differ by more than noise. Where pairs disagree, settings act on each \
                      other.";
    Found::new("effects", "Effects of the settings", definition, table)
}

/// The logarithms of the ratios in each round, for all pairs of rows that have one and the other value of a flag and differ in
/// nothing else.
fn pairs(
    outcome: &Outcome,
    figure: &str,
    flag: usize,
    [one, other]: [&String; 2],
) -> Vec<Vec<f64>> {
    let rows = &outcome.rows;
    let pair = |row: usize| {
        let mut values = rows[row].values.clone();
        values[flag].clone_from(one);
        let base = rows.iter().position(|row| row.values == values)?;
        let logs = logarithms(&outcome.values(figure, base), &outcome.values(figure, row));
        let is_pair = [base, row].iter().all(|at| rows[*at].failure.is_none()) && !logs.is_empty();
        is_pair.then_some(logs)
    };
    (0..rows.len())
        .filter(|row| rows[*row].values.get(flag) == Some(other))
        .filter_map(pair)
        .collect()
}

/// Whether the effect of each value changes with each value of another flag; all further flags are as in the base. The rows must
/// be in the order in which they were planned, in which the last flag changes fastest. `None` if there are too few rounds.
pub fn interactions(grid: &[Vary], rows: &Outcome, figure: &str, better: Better) -> Option<Found> {
    let values_of = |choice: &[usize]| {
        let places = choice.iter().zip(grid);
        let row = places.fold(0, |at, (value, of)| at * of.alternatives.len() + value);
        rows.values(figure, row)
    };
    let logs = |from: &[usize], to: &[usize]| logarithms(&values_of(from), &values_of(to));
    let named =
        |(at, value): (usize, usize)| format!("{}={}", grid[at].key, grid[at].alternatives[value]);
    let of_flag =
        |(at, of): (usize, &Vary)| (1..of.alternatives.len()).map(move |value| (at, value));
    let values: Vec<(usize, usize)> = grid.iter().enumerate().flat_map(of_flag).collect();
    let (mut cells, mut lines, mut is_known) = (Vec::new(), Vec::new(), false);
    for &setting in &values {
        for &beside in values.iter().filter(|(at, _)| *at != setting.0) {
            let mut base = vec![0; grid.len()];
            let mut turned = base.clone();
            turned[setting.0] = setting.1;
            let alone = logs(&base, &turned);
            (base[beside.0], turned[beside.0]) = (beside.1, beside.1);
            let together = logs(&base, &turned);
            let change: Vec<f64> =
                together.iter().zip(&alone).map(|(two, one)| two - one).collect();
            let [alone, together, change] =
                [&alone, &together, &change].map(|logs| Effect::of_logarithms(logs));
            is_known |= change.is_some();
            let [in_base, brings] = [alone, together].map(noise::words);
            let (setting, beside) = (named(setting), named(beside));
            if let Some(together) = together.filter(|_| change.is_some_and(|of| !of.is_none())) {
                let still = if together.is_none() {
                    "makes no difference"
                } else if (together.ratio > 1.0) == (better == Better::Higher) {
                    "still helps"
                } else {
                    "costs"
                };
                lines.push(format!(
                    "{setting} {still} once {beside}: {brings}, and {in_base} in the base"
                ));
            }
            cells.push([setting, in_base, beside, brings, noise::words(change)].map(Cell::Text));
        }
    }
    if lines.is_empty() {
        lines.push("No setting changes what another brings by more than the noise.".to_owned());
    }
    let heads = [
        ("setting", "setting", ("", 0)),
        ("alone", "in the base", ("", 0)),
        ("beside", "once", ("", 0)),
        ("together", "it brings", ("", 0)),
        ("change", "the change", ("", 0)),
    ];
    let title = "Does a setting still help once another is changed?";
    let definition = "All further settings have their first values, as in the base. The change is the second effect over the first: \
                      at 1, the two settings do not act on each other.";
    let found = Found::new("interactions", title, definition, tabled(heads, cells));
    is_known.then_some(Found { lines, ..found })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::outcome::tests::outcome;

    #[test]
    fn a_value_is_compared_where_all_else_is_the_same() {
        let vary = ["nproc=1,2", "model=mlp,cnn"].map(|text| Vary::parse("--vary", text).unwrap());
        let rounds = |ms: f64| -> Vec<_> {
            [ms, 1.5 * ms, 2.0 * ms].map(|ms| json!({ "step_ms_median": ms })).to_vec()
        };
        let of = |ms: [Option<f64>; 4]| {
            let all = [["1", "mlp"], ["1", "cnn"], ["2", "mlp"], ["2", "cnn"]];
            let rows = ms.map(|ms| ("", ms.map_or(Vec::new(), rounds)));
            let mut outcome = outcome(&rows);
            for (row, values) in outcome.rows.iter_mut().zip(all) {
                row.values = values.map(str::to_owned).to_vec();
            }
            effects(&vary, &outcome, "step_ms_median").table
        };
        let shown = |ms| of(ms).csv().lines().skip(1).map(str::to_owned).collect::<Vec<_>>();
        // 2 and 8 times, and 2 and 8 times: 4 times on average.
        let all = shown([10.0, 20.0, 20.0, 160.0].map(Some));
        assert!(all[0].starts_with("nproc,2,1,4.00x (4.00-4.00),"), "{all:?}");
        assert!(all[0].ends_with(",2,2") && all[1].starts_with("model,cnn,mlp,4.00x"), "{all:?}");
        // A case that failed makes no pair.
        let all = shown([Some(10.0), None, Some(11.0), Some(160.0)]);
        assert!(all[0].starts_with("nproc,2,1,1.10x") && all[0].ends_with(",1,1"), "{all:?}");
        let all = shown([None; 4]);
        assert!(all.iter().all(|row| row.ends_with("too few rounds,,0,0")), "{all:?}");
    }
}
