//! Words that depend on what was counted.
//!
//! Figures of a trace without kernels are those of its operators, and titles and definitions are to say so.
//! Keys of columns and names of panels stay, as programs know them.

use crate::report::{Body, Report};

/// Says operators where the report says kernels.
pub(super) fn of_operators(report: &mut Report) {
    for figure in &mut report.figures {
        replace(&mut figure.column.definition);
        replace(&mut figure.column.label);
    }
    for section in &mut report.sections {
        replace(&mut section.lead);
        for panel in &mut section.panels {
            let texts = [&mut panel.title, &mut panel.unit, &mut panel.definition];
            texts.into_iter().for_each(replace);
            match &mut panel.body {
                Body::Nothing(reason) => replace(reason),
                // What was counted is told there, with both words.
                Body::Table(table) if panel.id != "files" => {
                    table.columns.iter_mut().for_each(|column| replace(&mut column.definition));
                }
                _ => {}
            }
        }
    }
}

/// Replaces whole words: `kernel_time_us` is the name of a column.
fn replace(text: &mut String) {
    let mut out = String::with_capacity(text.len());
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let mut rest = text.as_str();
    while !rest.is_empty() {
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        out.push_str(match word {
            "kernel" => "operator",
            "kernels" => "operators",
            "Kernel" => "Operator",
            "Kernels" => "Operators",
            word => word,
        });
        let end = after.find(is_part).unwrap_or(after.len());
        let (between, after) = after.split_at(end);
        out.push_str(between);
        rest = after;
    }
    *text = out.replace(" a operator", " an operator");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_are_replaced() {
        let mut text = "Kernels: a kernel, kernel_time_us, (kernels) \u{b7} Kernel.".to_owned();
        replace(&mut text);
        assert_eq!(text, "Operators: an operator, kernel_time_us, (operators) \u{b7} Operator.");
    }
}
