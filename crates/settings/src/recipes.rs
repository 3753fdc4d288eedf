//! Recipes: run specifications that the program carries, by name (`--recipe NAME`).
//!
//! Input: a name. Output: the specification, as if its file had been passed with `--config`. The files are in
//! `recipes`. A recipe states flags like any file, so this module knows no setting.

use std::path::Path;

use clap::builder::{PossibleValue, PossibleValuesParser};
use paceline_failure::{Failure, Result};

use super::spec_file::SpecFile;

/// A run specification with a name.
struct Recipe {
    name: &'static str,
    /// One line of help.
    about: &'static str,
    /// The file's path in the crate, for messages.
    path: &'static str,
    toml: &'static str,
}

static RECIPES: [Recipe; 3] = [
    Recipe {
        name: "tiny-llama",
        about: "A small Llama learns to tell good reviews from bad ones, in seconds, without a download",
        path: "recipes/tiny-llama.toml",
        toml: include_str!("../recipes/tiny-llama.toml"),
    },
    Recipe {
        name: "smollm2-yelp",
        about: "SmolLM2-360M classifies Yelp reviews; fetch both first (paceline fetch), or pass their folders",
        path: "recipes/smollm2-yelp.toml",
        toml: include_str!("../recipes/smollm2-yelp.toml"),
    },
    Recipe {
        name: "tiny-lm",
        about: "A small language model learns any text in --data-dir, byte by byte, in minutes, without a download",
        path: "recipes/tiny-lm.toml",
        toml: include_str!("../recipes/tiny-lm.toml"),
    },
];

/// The `clap` parser that accepts the names.
pub fn names() -> PossibleValuesParser {
    let value = |recipe: &Recipe| PossibleValue::new(recipe.name).help(recipe.about);
    PossibleValuesParser::new(RECIPES.iter().map(value))
}

/// The specification of the recipe of this name. Fails for an unknown name.
pub fn read(name: &str) -> Result<SpecFile> {
    let named = RECIPES.iter().find(|recipe| recipe.name == name);
    let Recipe { path, toml, .. } = named.ok_or_else(|| {
        let names: Vec<&str> = RECIPES.iter().map(|recipe| recipe.name).collect();
        Failure::Usage(format!("--recipe {name}: pass one of {}", names.join(", ")))
    })?;
    SpecFile::parse(Path::new(path), toml)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recipe_is_a_file_of_its_name_that_can_be_read() {
        for recipe in &RECIPES {
            assert_eq!(recipe.path, format!("recipes/{}.toml", recipe.name));
            assert!(read(recipe.name).unwrap().spec.has("model"), "{}", recipe.name);
        }
    }
}
