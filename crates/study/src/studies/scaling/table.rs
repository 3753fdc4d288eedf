//! Weak or strong scaling as text: the table, what its columns mean, the fit and the verdict.

use paceline_host::text::plural;
use paceline_table::table::Cell;

use super::Scaling;
use super::fit::Fit;
use super::rows::{Mode, Row};
use crate::study::{Setting, table_of};

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
    let mut text =
        format!("{head}{}\n{}\n{legend}", setting.on_link(), table(&scaling.rows, width));
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

fn table(rows: &[Row], width: Option<usize>) -> String {
    table_of(
        rows,
        &[
            ("", "ranks", 0, |row| Cell::Text(starred(row))),
            ("", "samples", 0, |row| Cell::Whole(row.global_batch as u64)),
            ("", "step ms", 2, |row| Cell::Number(row.step_ms)),
            ("", "samples/s", 0, |row| Cell::Number(row.samples_per_s)),
            ("", "speed-up", 2, |row| Cell::Number(row.speedup)),
            ("", "efficiency %", 1, |row| Cell::Number(row.efficiency_pct)),
            ("", "T_comm ms", 2, |row| Cell::from(row.t_comm_ms)),
            ("", "exposed ms", 2, |row| Cell::Number(row.exposed_ms)),
            ("", "hidden ms", 2, |row| Cell::Number(row.hidden_ms)),
            ("", "waiting ms", 2, |row| Cell::Number(row.waiting_ms)),
            ("", "serial %", 1, |row| Cell::from(row.serial_pct)),
        ],
    )
    .fitted(width)
}

/// The number of ranks, with a star if they share cores.
fn starred(row: &Row) -> String {
    format!("{}{}", if row.is_oversubscribed { "*" } else { "" }, row.ranks)
}

#[cfg(test)]
mod tests {
    use super::super::rows::Mode;
    use super::super::rows::rows;
    use super::super::rows::tests::measured;
    use super::super::verdict::tests::setting;
    use super::super::verdict::verdict;
    use super::*;

    fn scaling(mode: Mode, measured: &[Row], cores: usize) -> (Scaling, Setting) {
        let setting = setting(cores);
        let rows = rows(mode, measured, 1, cores);
        let fit = Fit::of(mode, &rows);
        let verdict = verdict(mode, &rows, &setting);
        (Scaling { mode, rows, fit, verdict }, setting)
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
        Amdahl: serial fraction 10.00 %, from 2 numbers of ranks, residual 0.000 in speed-up
        Strong scaling to 4 ranks is 76.9 % efficient: a step takes 32.50 ms, 7.50 ms more than the ideal 25.00 ms. Computing limits it, because what each step costs at any batch size does not shrink, and ranks share memory bandwidth, caches and clock rate: computing takes 32.50 ms instead of 25.00 ms; 0.00 ms of communication are exposed, 0.00 ms of waiting, and 0.00 ms are hidden.
        ");
    }

    #[test]
    fn rows_without_cores_are_marked() {
        let two = Row { exposed_ms: 1.25, hidden_ms: 8.5, ..measured(2, 128, 105.0) };
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
        * more ranks x threads than the 2 cores here: left out of the fit
        Gustafson: serial fraction 9.52 %, from one number of ranks, which any law fits
        Weak scaling to 2 ranks is 95.2 % efficient: a step takes 105.00 ms, 5.00 ms more than the ideal 100.00 ms. Nothing limits it here: computing takes 105.00 ms instead of 100.00 ms; 1.25 ms of communication are exposed, 0.00 ms of waiting, and 8.50 ms are hidden. 4 ranks (*) share 2 cores and are 45.5 % efficient, which says nothing about communication.
        ");
    }
}
