//! States in two sentences the limit of scaling, from the numbers of the rows.
//!
//! A step of N ranks takes longer than the ideal step. The difference has four parts: computing that
//! takes longer than its share, waiting for the slowest rank, moving data while nothing is computed, and
//! a rest. The largest of the first three is the limit, unless the rest outweighs them.

use paceline_host::text::plural;

use super::laws::{Mode, Point};
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
    fn of(mode: Mode, single: &Point, row: &Point) -> Self {
        // Waiting that computation hides costs nothing.
        let waiting = row.waiting_ms;
        let compute = row.compute_ms - mode.ideal_ms(single.compute_ms, row.ranks);
        Self { compute, waiting, moving: row.exposed_ms - waiting }
    }
}

/// The verdict on `rows`, which begin with one rank. It is about the largest number of ranks
/// that have cores of their own, otherwise about the largest number of ranks.
pub fn verdict(mode: Mode, rows: &[Point], setting: &Setting) -> String {
    let Some((single, others)) = rows.split_first() else { return String::new() };
    let mut with_cores = others.iter().filter(|row| !row.is_crowded);
    let Some(row) = with_cores.next_back().or(others.last()) else { return String::new() };
    if setting.is_program() {
        return of_program(mode, single, row, setting);
    }
    let losses = Losses::of(mode, single, row);
    let ideal = mode.ideal_ms(single.step_ms, row.ranks);
    let mut text = format!(
        "{} scaling to {} ranks is {:.1} % efficient{}: a step takes {:.2} ms, {:.2} ms {} than the \
         ideal {ideal:.2} ms. ",
        mode.names()[0],
        row.ranks,
        row.efficiency_pct(single),
        setting.on_link(),
        row.step_ms,
        (row.step_ms - ideal).abs(),
        if row.step_ms >= ideal { "more" } else { "less" },
    );
    text += &limit(mode, single, row, losses, setting);
    if let Some(crowded) = others.iter().rfind(|other| other.is_crowded)
        && crowded.ranks != row.ranks
    {
        text += &format!(
            " {} ranks (*) share {} and are {:.1} % efficient, which says nothing about communication.",
            crowded.ranks,
            plural(setting.cores, "core"),
            crowded.efficiency_pct(single)
        );
    }
    text
}

fn limit(mode: Mode, single: &Point, row: &Point, losses: Losses, setting: &Setting) -> String {
    let Losses { compute, waiting, moving } = losses;
    let ideal_compute = mode.ideal_ms(single.compute_ms, row.ranks);
    let computing =
        format!("computing takes {:.2} ms instead of {ideal_compute:.2} ms", row.compute_ms);
    let communication = format!(
        "{moving:.2} ms of communication are exposed, {waiting:.2} ms of waiting, and {:.2} ms are hidden",
        row.hidden_ms
    );
    let largest = compute.max(waiting).max(moving);
    let measured = format!("{computing}; {communication}.");
    if row.efficiency_pct(single) >= GOOD_PCT {
        return format!("Nothing limits it here: {measured}");
    }
    if row.is_crowded {
        return format!("{}, so {measured}", too_few_cores(row, setting));
    }
    // The step time is the slowest rank's, while its parts are means over the ranks. So the parts may
    // leave a rest. If the largest part is less than half of the loss and less than the rest, no part is
    // called the limit.
    let lost = row.step_ms - mode.ideal_ms(single.step_ms, row.ranks);
    if largest < 0.5 * lost && largest < lost - compute.max(0.0) - waiting - moving {
        return format!("No single part limits it: {measured}");
    }
    if compute >= largest {
        let why = match mode {
            _ if setting.is_busy => "other work takes cores from the ranks",
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

fn too_few_cores(row: &Point, setting: &Setting) -> String {
    let (threads, cores) = (plural(setting.threads, "thread"), plural(setting.cores, "core"));
    format!("Too few cores limit it: {} ranks x {threads} on {cores}", row.ranks)
}

/// The verdict on a program. Its communication is not measured.
fn of_program(mode: Mode, single: &Point, row: &Point, setting: &Setting) -> String {
    let (efficiency, ranks) = (row.efficiency_pct(single), row.ranks);
    let name = mode.names()[0];
    let mut text = format!("{name} scaling to {ranks} ranks is {efficiency:.1} % efficient.");
    if efficiency >= GOOD_PCT {
        text += if row.step_ms == 0.0 && efficiency > 1.5 * GOOD_PCT {
            " If each rank prints the throughput of all, let rank 0 alone print it."
        } else {
            " Nothing limits it here."
        };
        return text;
    }
    if row.is_crowded {
        text += &format!(" {}", too_few_cores(row, setting));
        if setting.threads > 1 {
            let threads = (setting.cores / ranks).max(1);
            text += &format!("; with OMP_NUM_THREADS={threads} they have fewer");
        }
        text.push('.');
    }
    let parts = |of: &Point| [of.in_backward_ms, of.step_ms - of.in_backward_ms];
    let [ideal, ideal_rest] = parts(single).map(|ms| mode.ideal_ms(ms, ranks));
    let [backward, rest] = parts(row);
    if backward > 0.0 {
        let most = if backward - ideal >= rest - ideal_rest {
            "in backward passes, where DistributedDataParallel waits for gradients"
        } else {
            "outside of backward passes"
        };
        text += &format!(
            " Most of the loss is {most}. Backward passes take {backward:.2} ms instead of {ideal:.2} ms, and all else {rest:.2} ms \
             instead of {ideal_rest:.2} ms."
        );
    }
    if row.step_ms > 0.0 && !row.is_crowded {
        text += &format!(
            " The part of communication: paceline record -- paceline launch -n {ranks} -- PROGRAM"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::laws::tests::point;
    use super::*;
    use crate::studies::tests::setting;

    /// The verdict on two ranks with these times, compared with one rank whose step takes 100 ms.
    fn of_two(mode: Mode, step: f64, compute: f64, exposed: f64, waiting: f64) -> String {
        let two = Point {
            compute_ms: compute,
            exposed_ms: exposed,
            waiting_ms: waiting,
            ..point(2, if mode == Mode::Weak { 128 } else { 64 }, step, 2)
        };
        verdict(mode, &[point(1, 64, 100.0, 2), two], &setting(2))
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
        let all = |cores| [(1, 100.0), (2, 51.0), (4, 55.0)].map(|(n, ms)| point(n, 64, ms, cores));
        let text = verdict(Mode::Strong, &all(2), &setting(2));
        assert!(text.starts_with("Strong scaling to 2 ranks is 98.0 % efficient"), "{text}");
        assert!(text.contains("4 ranks (*) share 2 cores and are 45.5 % efficient"), "{text}");
        let text = verdict(Mode::Strong, &all(1)[..], &setting(1));
        assert!(text.contains("Too few cores limit it: 4 ranks x 1 thread on 1 core"), "{text}");
    }

    #[test]
    fn the_limit_of_a_program_is_what_was_measured_of_it() {
        let of = |cores, step_ms, in_backward_ms| {
            let program = Setting { transport: String::new(), threads: 2, ..setting(cores) };
            let one = Point { in_backward_ms: 60.0, ..point(1, 64, 100.0, 2) };
            let two = Point { in_backward_ms, is_crowded: cores < 4, ..point(2, 128, step_ms, 2) };
            verdict(Mode::Weak, &[one, two], &program)
        };
        insta::assert_snapshot!(
            of(4, 140.0, 95.0),
            @"Weak scaling to 2 ranks is 71.4 % efficient. Most of the loss is in backward passes, where DistributedDataParallel waits for gradients. Backward passes take 95.00 ms instead of 60.00 ms, and all else 45.00 ms instead of 40.00 ms. The part of communication: paceline record -- paceline launch -n 2 -- PROGRAM"
        );
        for (text, words) in [
            (of(4, 140.0, 65.0), "Most of the loss is outside of backward passes."),
            (of(4, 104.0, 64.0), "is 96.2 % efficient. Nothing limits it here."),
            (
                of(2, 140.0, 95.0),
                "2 ranks x 2 threads on 2 cores; with OMP_NUM_THREADS=1 they have fewer.",
            ),
            (of(2, 0.0, 0.0), "let rank 0 alone print it."),
        ] {
            assert!(text.contains(words), "no {words:?} in: {text}");
        }
    }

    #[test]
    fn the_emulated_link_is_named() {
        let all = [point(1, 64, 100.0, 2), point(2, 64, 51.0, 2)];
        let on_link = Setting { link: Some("1 Gbit/s, 50.0 us".into()), ..setting(2) };
        let text = verdict(Mode::Strong, &all, &on_link);
        assert!(text.contains("efficient, on an emulated link of 1 Gbit/s, 50.0 us: "), "{text}");
    }
}
