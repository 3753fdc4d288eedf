//! Draws a timeline with characters, one row for each stage.

use crate::{Action, Plan, Timeline};

/// Draws when each rank does what, at most `width` characters wide. An action is its letter and its micro-batch, then `=`; if
/// there is no room for the number, it is its letter again and again. A point is time in which the rank of the stage is idle. It
/// is empty where the rank does something for another stage.
pub fn drawing(plan: &Plan, timeline: &Timeline, width: usize) -> String {
    let placement = plan.shape().placement;
    let label = |stage: usize| format!("stage {stage} ");
    let margin = label(placement.stages() - 1).len();
    let room = width.saturating_sub(margin).max(1);
    let scale = scale(timeline, room);
    let column = |time: f64| ((time * scale).round() as usize).min(room);
    let has_numbers = shortest(timeline) * scale > 1.5;
    let mut text = String::new();
    for stage in 0..placement.stages() {
        let mut row = vec![b'.'; column(timeline.makespan)];
        for ran in &timeline.ranks[placement.rank(stage)] {
            let cell = &mut row[column(ran.start)..column(ran.end)];
            if ran.action.stage == stage {
                write(&ran.action, has_numbers, cell)
            } else {
                cell.fill(b' ')
            }
        }
        let row = String::from_utf8(row).expect("letters, digits and signs");
        text += &format!("{:<margin$}{}\n", label(stage), row.trim_end_matches(' '));
    }
    text
}

fn write(action: &Action, has_numbers: bool, cell: &mut [u8]) {
    let letter = action.kind.letters().as_bytes()[0];
    if !has_numbers {
        return cell.fill(letter);
    }
    cell.fill(b'=');
    let whole = format!("{}{}", action.kind.letters(), action.micro_batch);
    let shown = if whole.len() <= cell.len() { whole.as_bytes() } else { &whole.as_bytes()[..1] };
    cell.iter_mut().zip(shown).for_each(|(cell, shown)| *cell = *shown);
}

/// The duration of the shortest action that takes any time.
fn shortest(timeline: &Timeline) -> f64 {
    let lasts = timeline.ranks.iter().flatten().map(|ran| ran.end - ran.start);
    lasts.filter(|time| *time > 0.0).fold(f64::INFINITY, f64::min)
}

/// Characters per unit of time: as many as there is room for, and a whole number for the shortest action if it gets any.
fn scale(timeline: &Timeline, columns: usize) -> f64 {
    if timeline.makespan <= 0.0 {
        return 0.0;
    }
    let most = columns as f64 / timeline.makespan;
    let whole = (shortest(timeline) * most + 1e-9).floor();
    if whole >= 1.0 && whole.is_finite() { whole / shortest(timeline) } else { most }
}
