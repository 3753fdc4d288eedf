//! The meaning of the flags of `paceline generate`, and the values that are refused.
//!
//! Input: the flags, and the folder of the model. Output: settings that can be used. This module generates nothing.

use paceline_failure::{Result, usage};
use paceline_files::Printable;
use paceline_host::text::plural;
use paceline_model::{LlamaConfig, Sampling};

use super::args::GenerateArgs;
use crate::commands::folder::Folder;

/// How tokens are chosen.
pub(super) fn sampling(args: &GenerateArgs) -> Result<Sampling> {
    let is_random = args.temperature.is_some() || args.top_k.is_some() || args.top_p.is_some();
    let temperature = args.temperature.unwrap_or(1.0);
    if args.seed.is_some() && !is_random {
        return usage(
            "--seed decides random choices, and there are none; add --temperature T, --top-k K or --top-p P",
        );
    }
    let GenerateArgs { top_k, top_p, .. } = *args;
    Ok(if is_random {
        Sampling::Random { temperature, top_k, top_p, seed: args.seed.unwrap_or(0) }
    } else {
        Sampling::Greedy
    })
}

/// How many tokens the model sees at most, if a text may be longer than that.
pub(super) fn window(args: &GenerateArgs, folder: &Folder) -> Result<Option<usize>> {
    let most = folder.config.max_position_embeddings;
    match args.window {
        Some(window) if window > most => usage(format!(
            "--window {window}: the model knows {most} positions; pass as many or fewer"
        )),
        Some(window) => Ok(Some(window)),
        None => Ok(folder.trained_len.filter(|len| (2..=most).contains(len))),
    }
}

/// The tokens of a prompt, which the model can read.
pub(super) fn prompt(
    text: &str,
    args: &GenerateArgs,
    folder: &Folder,
    window: Option<usize>,
) -> Result<Vec<u32>> {
    let tokens = folder.tokenizer.encode_whole(text)?;
    let LlamaConfig { vocab_size, max_position_embeddings: most, .. } = folder.config;
    let is_unknown = |token: &&u32| **token as usize >= vocab_size;
    if let Some(token) = tokens.iter().find(is_unknown) {
        return usage(format!(
            "--model {}: tokenizer.json makes token {token} of --prompt, and by config.json the model has {vocab_size} tokens; \
             use the tokenizer.json of this model",
            args.folder.printable()
        ));
    }
    if tokens.is_empty() {
        return usage("--prompt has no token; pass the text to go on from");
    }
    if tokens.len() >= most && window.is_none() {
        return usage(format!(
            "--prompt has {}, and the model knows {most} positions, one of which the first new token needs; shorten the prompt, or pass --window",
            plural(tokens.len(), "token")
        ));
    }
    Ok(tokens)
}
