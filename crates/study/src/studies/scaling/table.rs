//! Weak or strong scaling as text: the table, the meaning of its columns, the fit and the verdict.

use paceline_host::text::plural;
use paceline_table::table::Columns;

use super::Scaling;
use super::fit::Fit;
use super::speedup::{Mode, Row};
use crate::step::{MEDIANS, communication_columns, step_columns};
use crate::study::Setting;

/// The table of `scaling`, and the lines below it.
pub fn text(scaling: &Scaling, setting: &Setting, width: Option<usize>) -> String {
    let (head, legend, law) = match scaling.mode {
        Mode::Weak => (
            "Weak scaling: the batch of each rank stays",
            "T_comm = T_N - T_1; serial: the fraction f for which speed-up = N - f (N - 1)",
            "Gustafson",
        ),
        Mode::Strong => (
            "Strong scaling: the global batch stays",
            "T_comm = T_N - T_1 / N; serial: the fraction f for which speed-up = 1 / (f + (1 - f) / N)",
            "Amdahl",
        ),
    };
    let mut text = format!(
        "{head}{}\n{}\n{legend}\n{MEDIANS}",
        setting.on_link(),
        scaling.table.fitted(width)
    );
    if scaling.rows.iter().any(|row| row.is_oversubscribed) {
        text += &format!(
            "\n* more ranks x threads than the {} here: left out of the fit",
            plural(setting.cores, "core")
        );
    }
    text += &match &scaling.fit {
        Fit::Found { serial, residual: Some(residual), num_points } => format!(
            "\n{law}: serial fraction {:.2} %, from {num_points} numbers of ranks, residual \
             {residual:.3} in speed-up",
            100.0 * serial
        ),
        Fit::Found { serial, residual: None, .. } => format!(
            "\n{law}: serial fraction {:.2} %, from one number of ranks, which any law fits",
            100.0 * serial
        ),
        Fit::Refused(why) => format!("\n{law}: {why}"),
    };
    format!("{text}\n{}", scaling.verdict)
}

/// Definitions that are too long for the list of columns.
const OVERSUBSCRIBED: &str = "Whether there are more ranks x threads than cores.";
const WAITING: &str = "The part of the communication that waited for the slowest rank.";
const BLOCKED: &str = "The part of the waiting during which the main thread was blocked.";

/// The columns of the study.
pub fn columns() -> Columns<Row> {
    let columns = Columns::new()
        .add("mode", "", ("", 0), "What stays the same.", |row: &Row| row.mode.name())
        .add("", "ranks", ("", 0), "", starred)
        .add("ranks", "", ("", 0), "Number of ranks.", |row| row.ranks)
        .add("global_batch", "samples", ("", 0), "Of all ranks, per step.", |row| row.global_batch)
        .add("is_oversubscribed", "", ("", 0), OVERSUBSCRIBED, |row| row.is_oversubscribed);
    let columns = step_columns(columns, ["", ""], |row| &row.times)
        .add("samples_per_s", "samples/s", ("", 0), "Of all ranks.", |row| row.samples_per_s)
        .add("speedup", "speed-up", ("", 2), "samples_per_s over one rank's.", |row| row.speedup)
        .add("efficiency_pct", "efficiency", ("%", 1), "Speed-up per rank.", Row::efficiency_pct)
        .add("t_comm_ms", "T_comm", ("ms", 2), "The step minus the ideal one.", |row| {
            row.t_comm_ms
        });
    communication_columns(columns, [("", 1), ("exposed", 2), ("hidden", 2)], |row| &row.times)
        .add("waiting_ms", "waiting", ("ms", 2), WAITING, |row| row.waiting_ms)
        .add("exposed_waiting_ms", "", ("ms", 2), BLOCKED, |row| row.exposed_waiting_ms)
        .add("compute_ms", "", ("ms", 2), "The main thread computes.", |row| row.compute_ms)
        .add("serial_pct", "serial", ("%", 1), "Serial fraction, from this row.", |row| {
            row.serial_pct
        })
}

/// The number of ranks, with a star if they share cores.
fn starred(row: &Row) -> String {
    format!("{}{}", if row.is_oversubscribed { "*" } else { "" }, row.ranks)
}

#[cfg(test)]
mod tests {
    use super::super::speedup::Mode;
    use super::super::speedup::tests::measured;
    use super::super::verdict::tests::setting;
    use super::*;
    use crate::step::tests::times;

    fn scaling(mode: Mode, measured: &[Row], cores: usize) -> (Scaling, Setting) {
        let setting = setting(cores);
        (Scaling::of(mode, measured, &setting), setting)
    }

    #[test]
    fn rows_with_cores_enough_are_fitted() {
        let all = [(1, 100.0), (2, 55.0), (4, 32.5)].map(|(n, ms)| measured(n, 64, ms));
        let (scaling, setting) = scaling(Mode::Strong, &all, 4);
        insta::assert_snapshot!(text(&scaling, &setting, None), @r"
        Strong scaling: the global batch stays
        ranks  samples  step ms  samples/s  speed-up  efficiency %  T_comm ms  exposed ms  hidden ms  waiting ms  serial %
        -----  -------  -------  ---------  --------  ------------  ---------  ----------  ---------  ----------  --------
        1           64   100.00        640      1.00         100.0          –        0.00       0.00        0.00         –
        2           64    55.00      1,164      1.82          90.9       5.00        0.00       0.00        0.00      10.0
        4           64    32.50      1,969      3.08          76.9       7.50        0.00       0.00        0.00      10.0
        T_comm = T_N - T_1 / N; serial: the fraction f for which speed-up = 1 / (f + (1 - f) / N)
        step: median over the rounds of the runs' median step, of the slowest rank; other times: medians over the rounds of means over ranks and steps
        Amdahl: serial fraction 10.00 %, from 2 numbers of ranks, residual 0.000 in speed-up
        Strong scaling to 4 ranks is 76.9 % efficient: a step takes 32.50 ms, 7.50 ms more than the ideal 25.00 ms. Computing limits it, because what each step costs at any batch size does not shrink, and ranks share memory bandwidth, caches and clock rate: computing takes 32.50 ms instead of 25.00 ms; 0.00 ms of communication are exposed, 0.00 ms of waiting, and 0.00 ms are hidden.
        ");
    }

    #[test]
    fn rows_without_cores_are_marked() {
        let two = Row { times: times(105.0, 0.0, 1.25, 8.5), ..measured(2, 128, 105.0) };
        let all = [measured(1, 64, 100.0), two, measured(4, 256, 220.0)];
        let (scaling, setting) = scaling(Mode::Weak, &all, 2);
        insta::assert_snapshot!(text(&scaling, &setting, None), @r"
        Weak scaling: the batch of each rank stays
        ranks  samples  step ms  samples/s  speed-up  efficiency %  T_comm ms  exposed ms  hidden ms  waiting ms  serial %
        -----  -------  -------  ---------  --------  ------------  ---------  ----------  ---------  ----------  --------
        1           64   100.00        640      1.00         100.0          –        0.00       0.00        0.00         –
        2          128   105.00      1,219      1.90          95.2       5.00        1.25       8.50        0.00       9.5
        *4         256   220.00      1,164      1.82          45.5     120.00        0.00       0.00        0.00      72.7
        T_comm = T_N - T_1; serial: the fraction f for which speed-up = N - f (N - 1)
        step: median over the rounds of the runs' median step, of the slowest rank; other times: medians over the rounds of means over ranks and steps
        * more ranks x threads than the 2 cores here: left out of the fit
        Gustafson: serial fraction 9.52 %, from one number of ranks, which any law fits
        Weak scaling to 2 ranks is 95.2 % efficient: a step takes 105.00 ms, 5.00 ms more than the ideal 100.00 ms. Nothing limits it here: computing takes 105.00 ms instead of 100.00 ms; 1.25 ms of communication are exposed, 0.00 ms of waiting, and 8.50 ms are hidden. 4 ranks (*) share 2 cores and are 45.5 % efficient, which says nothing about communication.
        ");
    }
}
