//! The cases of a study: scenes, and the variants in each.
//!
//! A scene is a setting in which variants are compared, such as a bandwidth. The first variant is the base, with which the others
//! are compared. Variants of different scenes share their runs if they have the same specification.

use paceline_failure::Result;

use crate::cases::Case;
use crate::spec::Spec;

/// A setting in which variants are compared.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The setting, in words; empty if there is only one.
    pub name: String,
    /// The number that scenes of one kind differ in.
    pub at: Option<f64>,
    /// The base, and the variants to compare with it.
    pub variants: Vec<Variant>,
}

/// A way to run in a scene.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The change, in words.
    pub name: String,
    /// The value of each varied flag, if flags are varied.
    pub values: Vec<String>,
    /// The specification of its runs.
    pub spec: Spec,
    /// Whether its time means something.
    pub is_timed: bool,
}

impl Scene {
    /// A scene without variants.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), at: None, variants: Vec::new() }
    }

    /// The same scene with its number.
    pub fn at(self, number: f64) -> Self {
        Self { at: Some(number), ..self }
    }

    /// The same scene with another variant.
    pub fn with(mut self, name: impl Into<String>, spec: Spec) -> Self {
        let (name, values) = (name.into(), Vec::new());
        self.variants.push(Variant { name, values, spec, is_timed: true });
        self
    }

    /// The same scene; the time of its last variant means nothing.
    pub fn untimed(mut self) -> Self {
        self.variants.last_mut().into_iter().for_each(|last| last.is_timed = false);
        self
    }
}

/// The cases of all scenes, each once and checked, and for each variant the place of its case among them.
pub fn cases(scenes: &[Scene]) -> Result<(Vec<Case>, Vec<usize>)> {
    let (mut cases, mut of_variants) = (Vec::<Case>::new(), Vec::new());
    for scene in scenes {
        let others = cases.len();
        for Variant { name, spec, .. } in &scene.variants {
            let known = cases[..others].iter().position(|case| case.spec == *spec);
            of_variants.push(known.unwrap_or(cases.len()));
            if known.is_none() {
                let scene = if scene.name.is_empty() { "" } else { &format!("{}: ", scene.name) };
                cases.push(Case::new(format!("{scene}{name}"), spec.clone())?);
            }
        }
    }
    Ok((cases, of_variants))
}
