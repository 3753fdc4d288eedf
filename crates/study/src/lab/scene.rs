//! The runs of an experiment: scenes, and the variants in each.
//!
//! A scene is a setting in which an option may help or not, such as a bandwidth. Its variants differ in this option alone.
//! The first one is the base, with which the others are compared.

use paceline_failure::Result;

use crate::plan::Case;
use crate::spec::Spec;

/// A setting in which the option is changed.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The setting, in words.
    pub name: String,
    /// The number that scenes of one kind differ in, for a chart over it.
    pub at: Option<f64>,
    /// The base, and the variants to compare with it.
    pub variants: Vec<Variant>,
}

/// A way to run in a scene.
#[derive(Clone, Debug)]
pub struct Variant {
    /// The change, in words.
    pub name: String,
    /// The specification of its runs.
    pub spec: Spec,
    /// Whether its time means something.
    pub is_timed: bool,
}

impl Scene {
    /// A scene of the runs of `base`.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), at: None, variants: Vec::new() }
    }

    /// The same scene with its number.
    pub fn at(self, number: f64) -> Self {
        Self { at: Some(number), ..self }
    }

    /// The same scene with another variant.
    pub fn with(mut self, name: impl Into<String>, spec: Spec) -> Self {
        self.variants.push(Variant { name: name.into(), spec, is_timed: true });
        self
    }

    /// The same with a variant whose time means nothing.
    pub fn with_untimed(mut self, name: impl Into<String>, spec: Spec) -> Self {
        self.variants.push(Variant { name: name.into(), spec, is_timed: false });
        self
    }
}

/// The cases of all scenes in a row. Each is checked.
pub fn cases(scenes: &[Scene]) -> Result<Vec<Case>> {
    let variants = scenes.iter().flat_map(|scene| {
        scene.variants.iter().map(move |variant| {
            let name = match scene.name.as_str() {
                "" => variant.name.clone(),
                name => format!("{name}: {}", variant.name),
            };
            Case::new(name, variant.spec.clone())
        })
    });
    variants.collect()
}
