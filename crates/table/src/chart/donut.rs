//! Donut charts, side by side: each is a ring that is divided into parts.

use std::f64::consts::TAU;

use maud::Markup;

use super::color::PageColor;
use super::stacked::Part;
use super::words::{SIZE, SMALL, fitted, legend_of};
use crate::canvas::{Align, Canvas};

/// A ring.
#[derive(Clone, Debug, PartialEq)]
pub struct Donut {
    /// The name of the whole; written in the middle of the ring.
    pub label: String,
    /// The parts, clockwise from the top.
    pub parts: Vec<Part>,
}

/// Rings with a common unit.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Donuts {
    /// The unit of the values.
    pub unit: String,
    /// The rings, in reading order.
    pub donuts: Vec<Donut>,
}

const CELL: (f64, f64) = (160.0, 164.0);
const WIDEST: f64 = 280.0;
const OUTER: f64 = 70.0;
const INNER: f64 = 36.0;
/// The largest angle between two corners of a ring: its sides are straight, and must look round.
const FINEST: f64 = TAU / 240.0;

impl Donuts {
    /// Names and colors of all parts, in order of appearance.
    pub fn legend(&self) -> Vec<(String, PageColor)> {
        let parts = self.donuts.iter().flat_map(|donut| &donut.parts);
        legend_of(parts.map(|part| (part.name.as_str(), part.color)))
    }

    /// The `<svg>` element, `width` pixels wide.
    pub fn svg(&self, width: i32, title: &str) -> Markup {
        let per_row = ((f64::from(width) / CELL.0) as usize).max(1);
        let cell = (f64::from(width) / self.donuts.len().clamp(1, per_row) as f64).min(WIDEST);
        let rows = self.donuts.len().div_ceil(per_row).max(1);
        let mut canvas = Canvas::new(f64::from(width), rows as f64 * CELL.1);
        for (at, donut) in self.donuts.iter().enumerate() {
            let center = (
                ((at % per_row) as f64 + 0.5) * cell,
                (at / per_row) as f64 * CELL.1 + OUTER + 10.0,
            );
            self.donut(&mut canvas, donut, center);
        }
        canvas.element(title)
    }

    fn donut(&self, canvas: &mut Canvas, donut: &Donut, center: (f64, f64)) {
        let total: f64 = donut.parts.iter().map(|part| part.value.max(0.0)).sum();
        let on_circle = |radius: f64, angle: f64| {
            (center.0 + radius * angle.sin(), center.1 - radius * angle.cos())
        };
        let mut angle = 0.0;
        for part in donut.parts.iter().filter(|part| part.value > 0.0) {
            let share = part.value / total;
            let end = angle + share * TAU;
            let steps = ((end - angle) / FINEST).ceil().max(1.0) as usize;
            let along = |at: usize| angle + (end - angle) * at as f64 / steps as f64;
            let outside = (0..=steps).map(|at| on_circle(OUTER, along(at)));
            let inside = (0..=steps).rev().map(|at| on_circle(INNER, along(at)));
            let corners: Vec<_> = outside.chain(inside).collect();
            let hover = format!(
                "{}, {}: {} {} ({:.2} %)",
                donut.label,
                part.name,
                part.value,
                self.unit,
                100.0 * share
            );
            canvas.polygon(&corners, part.color, &hover);
            if share > 0.09 {
                let place = on_circle((OUTER + INNER) / 2.0, (angle + end) / 2.0);
                let words = format!("{:.0} %", 100.0 * share);
                canvas.text(&words, place, SMALL, part.color.on(), Align::Middle);
            }
            angle = end;
        }
        let words = fitted(&donut.label, SIZE, 2.0 * INNER - 8.0);
        canvas.text(&words, center, SIZE, PageColor::Text, Align::Middle)
    }
}
