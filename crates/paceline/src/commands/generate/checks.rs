//! The meaning of the flags of `paceline generate`, and the values that are refused.
//!
//! Input: the flags, and the folder of the model. Output: settings that can be used. This module generates nothing.

use paceline_failure::Result;
use paceline_files::Printable;
use paceline_host::text::plural;
use paceline_model::{LlamaConfig, Sampling};

use super::args::GenerateArgs;
use super::folder::Folder;
use super::usage;

/// How tokens are chosen.
pub(super) fn sampling(args: &GenerateArgs) -> Result<Sampling> {
    let is_random = args.temperature.is_some() || args.top_k.is_some() || args.top_p.is_some();
    let given = [
        ("--temperature", args.temperature.is_some()),
        ("--top-k", args.top_k.is_some()),
        ("--top-p", args.top_p.is_some()),
        ("--seed", args.seed.is_some()),
    ];
    let given = given.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag);
    let temperature = args.temperature.unwrap_or(1.0);
    if let (true, Some(flag)) = (args.greedy, given) {
        return Err(usage(format!("--greedy takes no {flag}; leave one of them out")));
    }
    if let (false, Some(flag)) = (is_random, given) {
        return Err(usage(format!(
            "{flag} decides random choices, and there are none; add --temperature T, --top-k K or --top-p P"
        )));
    }
    if !(temperature > 0.0 && temperature.is_finite()) {
        return Err(usage(format!(
            "--temperature {temperature}: pass a number above zero; for the likeliest tokens, leave it out"
        )));
    }
    if args.top_k == Some(0) {
        return Err(usage("--top-k 0: pass a number above zero; for all tokens, leave it out"));
    }
    if let Some(top_p) = args.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
        return Err(usage(format!(
            "--top-p {top_p}: pass a probability above 0 and at most 1; for all tokens, leave it out"
        )));
    }
    let penalty = args.repetition_penalty;
    if !(penalty > 0.0 && penalty.is_finite()) {
        return Err(usage(format!(
            "--repetition-penalty {penalty}: pass a number above zero; 1 changes nothing"
        )));
    }
    let GenerateArgs { top_k, top_p, .. } = *args;
    Ok(if is_random {
        Sampling::Random { temperature, top_k, top_p, seed: args.seed.unwrap_or(0) }
    } else {
        Sampling::Greedy
    })
}

pub(super) fn threads(args: &GenerateArgs) -> Result<usize> {
    match args.threads {
        Some(0) => Err(usage("--threads 0: pass 1 or more")),
        Some(threads) => Ok(threads),
        None => Ok(std::thread::available_parallelism().map_or(1, usize::from)),
    }
}

/// How many tokens the model sees at most, if a text may be longer than that.
pub(super) fn window(args: &GenerateArgs, folder: &Folder) -> Result<Option<usize>> {
    let most = folder.config.max_position_embeddings;
    match args.window {
        Some(window) if window < 2 => {
            Err(usage(format!("--window {window}: pass 2 tokens or more")))
        }
        Some(window) if window > most => Err(usage(format!(
            "--window {window}: the model knows {most} positions; pass as many or fewer"
        ))),
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
        return Err(usage(format!(
            "--model {}: tokenizer.json makes token {token} of --prompt, and by config.json the model has {vocab_size} tokens; \
             use the tokenizer.json of this model",
            args.folder.printable()
        )));
    }
    if tokens.is_empty() {
        return Err(usage("--prompt has no token; pass the text to go on from"));
    }
    if tokens.len() >= most && window.is_none() {
        return Err(usage(format!(
            "--prompt has {}, and the model knows {most} positions, one of which the first new token needs; shorten the prompt, or pass --window",
            plural(tokens.len(), "token")
        )));
    }
    Ok(tokens)
}
