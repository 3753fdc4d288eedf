//! Recipes: run specifications that the program carries, by name (`--recipe NAME`); and the two flags of commands that begin
//! with a recipe or with a file ([`BeginFlags`]).
//!
//! Input: a name. Output: the specification, as if its file had been passed with `--config`. The files are in
//! `recipes`. A recipe states flags like any file, so this module knows no setting.

use std::path::{Path, PathBuf};

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser};
use paceline_failure::{Failure, Result};

use super::spec::RunSpec;
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

static RECIPES: [Recipe; 4] = [
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
    Recipe {
        name: "mini-lm",
        about: "The same with a smaller model and a fixed number of steps: words in about two minutes on two cores",
        path: "recipes/mini-lm.toml",
        toml: include_str!("../recipes/mini-lm.toml"),
    },
];

/// Flags that name the settings with which a command begins.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Configuration")]
pub struct BeginFlags {
    /// Begin with the settings of this TOML or JSON file, such as the config.json of a run
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Begin with the settings of a recipe
    #[arg(long, value_name = "NAME", value_parser = names(), conflicts_with = "config")]
    recipe: Option<String>,
}

impl BeginFlags {
    /// The settings of the file or the recipe that the command keeps, overlaid by `flags`; and notes about settings of the file
    /// that flags replaced.
    pub fn overlaid(
        &self,
        flags: &RunSpec,
        is_kept: impl Fn(&str) -> bool,
    ) -> Result<(RunSpec, Vec<String>)> {
        let file = match (&self.config, &self.recipe) {
            (Some(path), _) => SpecFile::read(path)?,
            (None, Some(recipe)) => read(recipe)?,
            (None, None) => return Ok((flags.clone(), Vec::new())),
        };
        let (spec, notes) = file.keeping(is_kept).overlaid(flags)?;
        // A recipe is there to be changed, so one line says how.
        let is_long = self.recipe.is_some() && notes.len() > 1;
        Ok((spec, if is_long { vec![notes.join(", ")] } else { notes }))
    }
}

/// The `clap` parser that accepts the names.
fn names() -> PossibleValuesParser {
    let value = |recipe: &Recipe| PossibleValue::new(recipe.name).help(recipe.about);
    PossibleValuesParser::new(RECIPES.iter().map(value))
}

/// The specification of the recipe of this name. Fails for an unknown name.
fn read(name: &str) -> Result<SpecFile> {
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
