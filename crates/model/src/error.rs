//! The errors of this crate.

use std::fmt;
use std::path::PathBuf;

use paceline_files::{Printable, printable};
use paceline_kernels::KernelError;
use paceline_memory::{DType, MemoryError};

/// An error of this crate.
#[derive(thiserror::Error)]
pub enum ModelError {
    /// The configuration of a model is invalid.
    #[error("{}", printable(.0))]
    Config(String),
    /// The samples are longer than the sequences that a model knows.
    #[error("the samples have up to {longest} tokens, and the model knows {most} positions")]
    TooLong {
        /// The length of the longest sample.
        longest: usize,
        /// The longest that the model can take.
        most: usize,
    },
    /// A layer got another number of saved tensors, or of parts with such tensors, than it stored.
    #[error("a layer expected {expected} saved tensors, found {found}")]
    Saved {
        /// The number that it stored.
        expected: usize,
        /// The number that it got.
        found: usize,
    },
    /// A layer announces a gradient more often than its layout says.
    #[error("the gradient of {name} was announced {problem}; a layer must announce each use once")]
    Announcement {
        /// The parameter.
        name: String,
        /// How often it was announced.
        problem: &'static str,
    },
    /// A layer used a parameter while the unit of the parameter was closed.
    #[error("a layer used {what} of {name} while its unit {unit} was closed")]
    Closed {
        /// The unit.
        unit: String,
        /// The value or the gradient, whichever the layer used.
        what: &'static str,
        /// The parameter.
        name: String,
    },
    /// A layer does not compute with the tensors that it got.
    #[error("layer {layer}{}, whose {} is of type {}: {source}", of(unit), given.0, given.1)]
    Layer {
        /// The layer.
        layer: &'static str,
        /// The unit of its block; empty if the layer is in no block.
        unit: String,
        /// The name and the type of the tensor that the layer got.
        given: (&'static str, DType),
        /// The error.
        source: Box<ModelError>,
    },
    /// An objective or a layer needs a tensor that the batch does not have.
    #[error("the batch has no tensor {name:?}")]
    NotInBatch {
        /// The name of the tensor.
        name: &'static str,
    },
    /// A layer did not give the gradient of its input, such as the tokens of an embedding.
    #[error("layer {layer} gives no gradient of its input; it must be a model's first layer")]
    NoInputGradient {
        /// The layer.
        layer: &'static str,
    },
    /// This rank does not hold a range of flat storage, or of an optimizer's state.
    #[error("this rank does not hold the elements {} to {}", range.start, range.end)]
    NotHeld {
        /// The elements.
        range: std::ops::Range<usize>,
    },
    /// A hook that is called for a final gradient failed.
    #[error("{0}")]
    Hook(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A weight file cannot be read or written.
    #[error("{}: {}", path.printable(), printable(reason))]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A weight file cannot be written.
    #[error("cannot be written: {0}")]
    Write(#[from] std::io::Error),
    /// A weight file belongs to another model.
    #[error("{}: {}", path.printable(), printable(reason))]
    OtherModel {
        /// The file.
        path: PathBuf,
        /// The first parameter that differs, and how.
        reason: String,
    },
    /// A model computed a logit that is no number, or infinite.
    #[error(
        "the logit of token {token} is {value}: the weights are damaged, or their training has diverged"
    )]
    Logit {
        /// The token.
        token: usize,
        /// Its logit.
        value: f64,
    },
    /// A kernel refused its operands.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tensor or buffer could not be allocated or claimed.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The unit as a part of a sentence.
fn of(unit: &str) -> String {
    if unit.is_empty() { String::new() } else { format!(" of unit {unit}") }
}

impl ModelError {
    /// Whether an operation does not know an element type, or got another one than it expects.
    pub fn is_about_types(&self) -> bool {
        match self {
            Self::Layer { source, .. } => source.is_about_types(),
            Self::Memory(MemoryError::WrongType { .. })
            | Self::Kernel(
                KernelError::DType { .. }
                | KernelError::Type { .. }
                | KernelError::Memory(MemoryError::WrongType { .. }),
            ) => true,
            _ => false,
        }
    }

    fn is_of_layer(&self) -> bool {
        let refused = |error: &KernelError| {
            matches!(error, KernelError::Shape { .. } | KernelError::Geometry { .. })
        };
        match self {
            Self::Kernel(error) if refused(error) => true,
            Self::Saved { .. } => true,
            other => other.is_about_types(),
        }
    }

    /// Names the layer whose pass has failed, if this is about the tensors that it got: the innermost one. `given` is
    /// the name and the type of such a tensor.
    pub(crate) fn in_layer(self, layer: &'static str, given: (&'static str, DType)) -> Self {
        match self {
            named @ Self::Layer { .. } => named,
            other if other.is_of_layer() => {
                Self::Layer { layer, unit: String::new(), given, source: Box::new(other) }
            }
            other => other,
        }
    }

    /// Names the unit of the block that the layer is in.
    pub(crate) fn in_unit(mut self, name: &str) -> Self {
        if let Self::Layer { unit, .. } = &mut self
            && unit.is_empty()
        {
            name.clone_into(unit);
        }
        self
    }
}

impl fmt::Debug for ModelError {
    /// The message, because `main` and `unwrap` print this form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use paceline_kernels::linear::Activation;

    use crate::layers::Linear;
    use crate::{Layer, LayoutBuilder, gradcheck};

    #[test]
    fn an_error_about_a_shape_names_the_layer() {
        let mut layout = LayoutBuilder::new();
        let mut unit = layout.unit("fc");
        let layer: Box<dyn Layer> = Box::new(Linear::new(&mut unit, 3, 2, Activation::None));
        let error = gradcheck::worst_error(&layer, &layout.finish(1), &[4, 5], 1).unwrap_err();
        let message = error.to_string();
        for words in ["layer ", "Linear, whose input is of type f64: ", "shape"] {
            assert!(message.contains(words), "no {words:?} in: {message}");
        }
        assert!(!error.is_about_types());
    }
}
