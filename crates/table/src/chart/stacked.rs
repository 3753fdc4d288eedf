//! Horizontal stacked bars, with a scale below.

use maud::Markup;

use super::THIRD;
use super::color::PageColor;
use super::labels::{RowLabels, scale_below};
use super::scale::{brief, like};
use super::words::{SMALL, legend_of, width_of};
use crate::canvas::{Align, Canvas};

/// A part of a bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its name.
    pub name: String,
    /// Its value, which decides its length.
    pub value: f64,
    /// Its color.
    pub color: PageColor,
}

/// A bar.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    /// The name of the bar.
    pub label: String,
    /// The parts, from left to right.
    pub parts: Vec<Part>,
}

impl Part {
    /// A part.
    pub fn new(name: &str, value: f64, color: PageColor) -> Self {
        Self { name: name.to_owned(), value, color }
    }
}

/// Stacked bars with a common unit, from zero.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stacked {
    /// The unit of the values and of the scale.
    pub unit: String,
    /// The bars, from top to bottom.
    pub stacks: Vec<Stack>,
}

const ROW: f64 = 30.0;
const THICK: f64 = 21.0;
/// The height of a line of values below a bar.
const LINE: f64 = 17.0;
/// The side of the square that shows the color of a value.
const SQUARE: f64 = 8.0;

impl Stacked {
    /// Names and colors of all parts, in order of appearance.
    pub fn legend(&self) -> Vec<(String, PageColor)> {
        let parts = self.stacks.iter().flat_map(|stack| &stack.parts);
        legend_of(parts.map(|part| (part.name.as_str(), part.color)))
    }

    /// The `<svg>` element, `width` pixels wide.
    pub fn svg(&self, width: i32, title: &str) -> Markup {
        let labels = RowLabels::new(self.stacks.iter().map(|s| s.label.as_str()), width);
        let (left, right) = (labels.left(), f64::from(width) - 24.0);
        let total = |stack: &Stack| -> f64 { stack.parts.iter().map(|p| p.value.max(0.0)).sum() };
        let longest = self.stacks.iter().map(total).fold(0.0, f64::max);
        let per_unit = if longest > 0.0 { (right - left) / longest } else { 0.0 };
        let number = like(self.stacks.iter().flat_map(|s| &s.parts).map(|part| part.value));
        let x = |value: f64| left + value * per_unit;
        let below: Vec<Vec<Vec<(&Part, String)>>> = if width <= THIRD {
            let hidden = |stack| outside(stack, per_unit, &number);
            let lines = |stack| lines(hidden(stack), f64::from(width) - left);
            self.stacks.iter().map(lines).collect()
        } else {
            self.stacks.iter().map(|_| Vec::new()).collect()
        };
        let num_lines: usize = below.iter().map(Vec::len).sum();
        let bottom =
            (ROW + labels.above()) * self.stacks.len() as f64 + LINE * num_lines as f64 + 2.0;
        let mut canvas = Canvas::new(f64::from(width), bottom + 22.0);
        scale_below(&mut canvas, longest, &self.unit, (1.0, bottom), x);
        let mut top = 0.0;
        for (stack, below) in self.stacks.iter().zip(&below) {
            top += labels.above();
            let middle = top + ROW / 2.0 + 1.0;
            labels.draw(&mut canvas, &stack.label, top, middle);
            self.stack(&mut canvas, stack, (left, middle), per_unit, &number);
            top += ROW;
            for line in below {
                values(&mut canvas, line, (left, top + LINE / 2.0 - 2.0));
                top += LINE;
            }
        }
        canvas.element(title)
    }

    fn stack(
        &self,
        canvas: &mut Canvas,
        stack: &Stack,
        (left, middle): (f64, f64),
        per_unit: f64,
        number: &dyn Fn(f64) -> String,
    ) {
        let total: f64 = stack.parts.iter().map(|part| part.value.max(0.0)).sum();
        let mut x = left;
        for part in &stack.parts {
            let end = x + part.value.max(0.0) * per_unit;
            let percent = if total > 0.0 { 100.0 * part.value / total } else { 0.0 };
            let hover = format!(
                "{}, {}: {} {} ({percent:.2} % of {} {})",
                stack.label,
                part.name,
                part.value,
                self.unit,
                brief(total),
                self.unit
            );
            let (from, to) = ((x, middle - THICK / 2.0), (end, middle + THICK / 2.0));
            canvas.rect(from, to, part.color, &hover);
            let inside = number(part.value);
            if is_inside(&inside, end - x) {
                let place = ((x + end) / 2.0, middle);
                canvas.text(&inside, place, SMALL, part.color.on(), Align::Middle);
            }
            x = end;
        }
    }
}

/// Whether a value has room in its part of the bar.
fn is_inside(value: &str, length: f64) -> bool {
    length > width_of(value, SMALL) + 8.0
}

/// The parts above zero that are too short for their values. On a narrow chart, where a value under the pointer is
/// hard to reach, these values stand below the bar.
fn outside<'a>(
    stack: &'a Stack,
    per_unit: f64,
    number: &dyn Fn(f64) -> String,
) -> Vec<(&'a Part, String)> {
    let parts = stack.parts.iter().filter(|part| part.value > 0.0);
    let all = parts.map(|part| (part, number(part.value)));
    all.filter(|(part, value)| !is_inside(value, part.value * per_unit)).collect()
}

/// The length of a value with its square.
fn entry(value: &str) -> f64 {
    SQUARE + 4.0 + width_of(value, SMALL) + 10.0
}

/// Breaks values into lines that fit.
fn lines(all: Vec<(&Part, String)>, room: f64) -> Vec<Vec<(&Part, String)>> {
    let mut lines: Vec<Vec<(&Part, String)>> = Vec::new();
    let mut left = 0.0;
    for (part, value) in all {
        let length = entry(&value);
        match lines.last_mut().filter(|_| length <= left) {
            Some(line) => line.push((part, value)),
            None => {
                lines.push(vec![(part, value)]);
                left = room;
            }
        }
        left -= length;
    }
    lines
}

/// Draws a line of values, each after a square in the color of its part.
fn values(canvas: &mut Canvas, line: &[(&Part, String)], (left, middle): (f64, f64)) {
    let mut x = left;
    for (part, value) in line {
        let half = SQUARE / 2.0;
        canvas.rect((x, middle - half), (x + SQUARE, middle + half), part.color, &part.name);
        let place = (x + SQUARE + 4.0, middle);
        canvas.hover_text(value, place, SMALL, PageColor::Text, Align::Left, &part.name);
        x += entry(value);
    }
}

#[cfg(test)]
mod tests {
    use super::super::FULL;
    use super::*;

    #[test]
    fn every_value_is_on_a_narrow_chart() {
        let parts = (0..12).map(|at| {
            let value = if at == 3 { 800.0 } else { 1.25 + f64::from(at) };
            Part::new(&format!("part {at}"), value, PageColor::Series(at as usize))
        });
        let stack = Stack { label: "rank 0".into(), parts: parts.collect() };
        let stacked = Stacked { unit: "ms".into(), stacks: vec![stack.clone()] };
        let narrow = stacked.svg(THIRD, "narrow").0;
        for part in &stack.parts {
            assert!(narrow.contains(&format!(">{:.1}<", part.value)), "{}: {narrow}", part.name);
        }
        let wide = stacked.svg(FULL, "wide").0;
        assert!(wide.contains(">800.0<") && !wide.contains(">1.2<"), "{wide}");
    }

    #[test]
    fn lines_of_values_fit() {
        let part = Part::new("a", 1.0, PageColor::Compute);
        let all: Vec<_> = (0..9).map(|_| (&part, "12.34".to_owned())).collect();
        let broken = lines(all, 3.2 * entry("12.34"));
        assert_eq!(broken.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 3]);
        let narrow = lines(vec![(&part, "12.34".to_owned())], 1.0);
        assert_eq!(narrow.len(), 1, "a value wider than the chart has a line of its own");
    }
}
