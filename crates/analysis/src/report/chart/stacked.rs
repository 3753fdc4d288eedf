//! Horizontal stacked bars, with a scale below.

use super::canvas::{Align, Canvas, Drawn, SMALL, label_column, legend_of, width_of};
use super::color::PageColor;
use super::scale::{brief, like};
use crate::plot::PlotError;

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
    /// What the parts add up to.
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

impl Stacked {
    /// Names and colors of all parts, in order of appearance.
    pub(crate) fn legend(&self) -> Vec<(String, PageColor)> {
        let parts = self.stacks.iter().flat_map(|stack| &stack.parts);
        legend_of(parts.map(|part| (part.name.as_str(), part.color)))
    }

    pub(crate) fn svg(&self, width: i32, title: &str) -> Result<String, PlotError> {
        let bottom = ROW * self.stacks.len() as f64 + 2.0;
        let mut canvas = Canvas::new(width, bottom + 22.0, title)?;
        let left = label_column(self.stacks.iter().map(|s| s.label.as_str()), f64::from(width));
        let right = f64::from(width) - 24.0;
        let total = |stack: &Stack| -> f64 { stack.parts.iter().map(|p| p.value.max(0.0)).sum() };
        let longest = self.stacks.iter().map(total).fold(0.0, f64::max);
        let per_unit = if longest > 0.0 { (right - left) / longest } else { 0.0 };
        let number = like(self.stacks.iter().flat_map(|s| &s.parts).map(|part| part.value));
        let x = |value: f64| left + value * per_unit;
        canvas.scale_below((longest, 6.0), &self.unit, (1.0, bottom), x)?;
        for (at, stack) in self.stacks.iter().enumerate() {
            let middle = at as f64 * ROW + ROW / 2.0 + 1.0;
            canvas.row_label(&stack.label, left, middle)?;
            self.stack(&mut canvas, stack, (left, middle), per_unit, &number)?;
        }
        Ok(canvas.finish())
    }

    fn stack(
        &self,
        canvas: &mut Canvas,
        stack: &Stack,
        (left, middle): (f64, f64),
        per_unit: f64,
        number: &dyn Fn(f64) -> String,
    ) -> Drawn {
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
            canvas.rect(from, to, part.color, &hover)?;
            let inside = number(part.value);
            if end - x > width_of(&inside, SMALL) + 8.0 {
                let place = ((x + end) / 2.0, middle);
                canvas.hover_text(&inside, place, SMALL, part.color.on(), Align::Middle, &hover)?;
            }
            x = end;
        }
        Ok(())
    }
}
