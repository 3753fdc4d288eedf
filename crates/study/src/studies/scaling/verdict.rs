//! States in two sentences the limit of scaling, from the numbers of the rows.
//!
//! A step of N ranks takes longer than the ideal step. The difference has four parts: computing that
//! takes longer than its share, waiting for the slowest rank, moving data while nothing is computed, and
//! a rest. The largest of the first three is the limit, unless the rest outweighs them.

use paceline_host::text::plural;

use super::speedup::{Mode, Row};
use crate::study::Setting;

/// From this efficiency on, in percent, nothing is called a limit.
const GOOD_PCT: f64 = 95.0;

/// The losses of a step, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Losses {
    compute: f64,
    waiting: f64,
    moving: f64,
}

impl Losses {
    fn of(mode: Mode, single: &Row, row: &Row) -> Self {
        // Waiting that computation hides costs nothing.
        let waiting = row.exposed_waiting_ms;
        let compute = row.compute_ms - mode.ideal_ms(single.compute_ms, row.ranks);
        Self { compute, waiting, moving: row.times.exposed_ms - waiting }
    }
}

/// The verdict on `rows`, the first of which is that of one rank. It is about the largest number of ranks
/// that have cores of their own, otherwise about the largest number of ranks.
pub fn verdict(mode: Mode, rows: &[Row], setting: &Setting) -> String {
    let Some((single, others)) = rows.split_first() else { return String::new() };
    let mut with_cores = others.iter().filter(|row| !row.is_oversubscribed);
    let Some(row) = with_cores.next_back().or(others.last()) else { return String::new() };
    let losses = Losses::of(mode, single, row);
    let ideal = mode.ideal_ms(single.times.step.median, row.ranks);
    let mut text = format!(
        "{} scaling to {} ranks is {:.1} % efficient{}: a step takes {:.2} ms, {:.2} ms {} than the \
         ideal {ideal:.2} ms. ",
        if mode == Mode::Weak { "Weak" } else { "Strong" },
        row.ranks,
        row.efficiency_pct(),
        setting.on_link(),
        row.times.step.median,
        (row.times.step.median - ideal).abs(),
        if row.times.step.median >= ideal { "more" } else { "less" },
    );
    text += &limit(mode, single, row, losses, setting);
    if let Some(crowded) = others.iter().rfind(|other| other.is_oversubscribed)
        && crowded.ranks != row.ranks
    {
        text += &format!(
            " {} ranks (*) share {} and are {:.1} % efficient, which says nothing about communication.",
            crowded.ranks,
            plural(setting.cores, "core"),
            crowded.efficiency_pct()
        );
    }
    text
}

fn limit(mode: Mode, single: &Row, row: &Row, losses: Losses, setting: &Setting) -> String {
    let Losses { compute, waiting, moving } = losses;
    let ideal_compute = mode.ideal_ms(single.compute_ms, row.ranks);
    let computing =
        format!("computing takes {:.2} ms instead of {ideal_compute:.2} ms", row.compute_ms);
    let communication = format!(
        "{moving:.2} ms of communication are exposed, {waiting:.2} ms of waiting, and {:.2} ms are hidden",
        row.times.hidden_ms
    );
    let largest = compute.max(waiting).max(moving);
    let measured = format!("{computing}; {communication}.");
    if row.efficiency_pct() >= GOOD_PCT {
        return format!("Nothing limits it here: {measured}");
    }
    if row.is_oversubscribed {
        return format!(
            "Too few cores limit it: {} ranks x {} on {}, so {measured}",
            row.ranks,
            plural(setting.threads, "thread"),
            plural(setting.cores, "core")
        );
    }
    // The step time is the slowest rank's, while its parts are means over the ranks. So the parts may
    // leave a rest. If the largest part is less than half of the loss and less than the rest, no part is
    // called the limit.
    let lost = row.times.step.median - mode.ideal_ms(single.times.step.median, row.ranks);
    if largest < 0.5 * lost && largest < lost - compute.max(0.0) - waiting - moving {
        return format!("No single part limits it: {measured}");
    }
    if compute >= largest {
        let why = match mode {
            Mode::Weak => {
                "ranks that compute at once share memory bandwidth, caches and clock rate"
            }
            Mode::Strong => {
                "what each step costs at any batch size does not shrink, and ranks share memory \
                 bandwidth, caches and clock rate"
            }
        };
        return format!("Computing limits it, because {why}: {measured}");
    }
    if waiting >= largest {
        return format!("Waiting for the slowest rank limits it: {communication}; {computing}.");
    }
    format!("Exposed communication limits it: {communication}; {computing}.")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::speedup::Mode;
    use super::super::speedup::against_one_rank;
    use super::super::speedup::tests::measured;
    use super::*;
    use crate::step::tests::times;

    pub(crate) fn setting(cores: usize) -> Setting {
        Setting {
            machine: "a machine".into(),
            date: "2026-01-02 03:04:05".into(),
            command: "paceline bench scaling".into(),
            cores,
            rounds: 3,
            model: "cnn".into(),
            params: 688_138,
            transport: "shm".into(),
            link: None,
            threads: 1,
        }
    }

    /// The verdict on two ranks with these times, compared with one rank whose step takes 100 ms.
    fn of_two(mode: Mode, step: f64, compute: f64, exposed: f64, waiting: f64) -> String {
        let two = Row {
            compute_ms: compute,
            times: times(step, 0.0, exposed, 0.0),
            exposed_waiting_ms: waiting,
            ..measured(2, if mode == Mode::Weak { 128 } else { 64 }, step)
        };
        let rows = against_one_rank(mode, &[measured(1, 64, 100.0), two], 1, 2);
        verdict(mode, &rows, &setting(2))
    }

    #[test]
    fn the_largest_loss_is_named_with_its_numbers() {
        insta::assert_snapshot!(
            of_two(Mode::Weak, 140.0, 101.0, 39.0, 4.0),
            @"Weak scaling to 2 ranks is 71.4 % efficient: a step takes 140.00 ms, 40.00 ms more than the ideal 100.00 ms. Exposed communication limits it: 35.00 ms of communication are exposed, 4.00 ms of waiting, and 0.00 ms are hidden; computing takes 101.00 ms instead of 100.00 ms."
        );
        for (text, words) in [
            (of_two(Mode::Weak, 140.0, 101.0, 39.0, 30.0), "Waiting for the slowest rank limits"),
            (of_two(Mode::Weak, 140.0, 135.0, 5.0, 1.0), "share memory bandwidth"),
            (of_two(Mode::Strong, 80.0, 75.0, 5.0, 1.0), "does not shrink"),
            (of_two(Mode::Weak, 140.0, 101.0, 2.0, 1.0), "No single part"),
            (of_two(Mode::Strong, 51.0, 50.0, 1.0, 0.0), "Nothing limits it here"),
            (of_two(Mode::Strong, 49.0, 48.0, 1.0, 0.0), "1.00 ms less than the ideal 50.00 ms"),
        ] {
            assert!(text.contains(words), "no {words:?} in: {text}");
        }
    }

    #[test]
    fn ranks_without_cores_are_judged_only_if_there_are_no_others() {
        let all = [measured(1, 64, 100.0), measured(2, 64, 51.0), measured(4, 64, 55.0)];
        let text = verdict(Mode::Strong, &against_one_rank(Mode::Strong, &all, 1, 2), &setting(2));
        assert!(text.starts_with("Strong scaling to 2 ranks is 98.0 % efficient"), "{text}");
        assert!(text.contains("4 ranks (*) share 2 cores and are 45.5 % efficient"), "{text}");
        let text = verdict(Mode::Strong, &against_one_rank(Mode::Strong, &all, 1, 1), &setting(1));
        assert!(text.contains("Too few cores limit it: 4 ranks x 1 thread on 1 core"), "{text}");
    }

    #[test]
    fn the_emulated_link_is_named() {
        let all = [measured(1, 64, 100.0), measured(2, 64, 51.0)];
        let on_link = Setting { link: Some("1 Gbit/s, 50.0 us".into()), ..setting(2) };
        let text = verdict(Mode::Strong, &against_one_rank(Mode::Strong, &all, 1, 2), &on_link);
        assert!(text.contains("efficient, on an emulated link of 1 Gbit/s, 50.0 us: "), "{text}");
    }
}
