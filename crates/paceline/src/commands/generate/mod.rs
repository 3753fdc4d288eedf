//! `paceline generate`: the text with which a language model goes on.
//!
//! Takes a folder with a language model, and prompts. Prints each prompt and the text that follows, as it comes. Trains
//! nothing, and has no ranks.

pub mod args;
mod checks;

use std::time::Instant;

use paceline_checkpoint::command::Carried;
use paceline_data::text::TextStream;
use paceline_failure::{Result, usage};
use paceline_host::streams;
use paceline_host::text::plural;
use paceline_kernels::Compute;
use paceline_memory::Allocator;
use paceline_model::{Generator, Precision, TokenSampler};

use self::args::GenerateArgs;
use self::checks::{prompt, sampling, window};
use crate::commands::folder::Folder;

/// Runs `paceline generate`: checks the flags, the folder and the prompts, then generates. `carried` gives the tokenizer of a
/// data set that the program carries.
pub fn generate(args: &GenerateArgs, carried: Carried) -> Result<u8> {
    let sampling = sampling(args)?;
    let all_cores = || std::thread::available_parallelism().map_or(1, usize::from);
    let threads = args.threads.unwrap_or_else(all_cores);
    if args.prompts.iter().any(String::is_empty) {
        return usage("--prompt is empty; pass the text to go on from");
    }
    let folder = Folder::open(&args.folder, false, carried)?;
    let window = window(args, &folder)?;
    let prompts = args.prompts.iter().map(|text| prompt(text, args, &folder, window));
    let prompts = prompts.collect::<Result<Vec<_>>>()?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let most = window.unwrap_or(folder.config.max_position_embeddings);
    let max_len = most.min(longest.saturating_add(args.max_tokens));
    let compute = Compute::new(threads, Allocator::new())?;
    let storage = folder.load(Precision::from(args.precision).compute, &compute)?;
    let mut generator = Generator::new(&compute, &folder.config, &storage, max_len)?;
    for (at, (text, tokens)) in args.prompts.iter().zip(prompts).enumerate() {
        // Each text has choices of its own, so that it does not depend on those before it.
        let sampler = TokenSampler::new(sampling)?;
        let sampler = sampler.with_repetition_penalty(args.repetition_penalty)?;
        print(if at > 0 { "\n" } else { "" });
        print(text);
        go_on(&mut generator, sampler, tokens, (args, &folder, window))?;
    }
    Ok(0)
}

fn print(text: &str) {
    streams::stdout().part(text);
}

/// Goes on from the tokens of a prompt, and says at the end how long it took.
fn go_on(
    generator: &mut Generator,
    mut sampler: TokenSampler,
    mut tokens: Vec<u32>,
    (args, folder, window): (&GenerateArgs, &Folder, Option<usize>),
) -> Result<()> {
    let most = folder.config.max_position_embeddings;
    let num_read = tokens.len();
    let half = window.map(|window| window.div_ceil(2));
    let start = Instant::now();
    generator.forget();
    let seen = match window {
        Some(window) if num_read >= window => num_read - half.unwrap_or(0),
        _ => 0,
    };
    generator.read_all(&tokens[seen..])?;
    let read = start.elapsed();
    let mut stream = TextStream::new(&folder.tokenizer, &tokens);
    let (mut count, mut end) = (0, "the number that --max-tokens allows".to_owned());
    loop {
        let logits = generator.logits()?;
        let token = sampler.choose(&logits, &tokens)?;
        count += 1;
        if folder.ends.contains(&token) {
            end = "the model has ended the text".to_owned();
            break;
        }
        print(&stream.next(token)?);
        tokens.push(token);
        if count == args.max_tokens {
            break;
        }
        match (window, half) {
            (Some(window), Some(half)) if generator.position() == window => {
                generator.forget();
                generator.read_all(&tokens[tokens.len() - half..])?;
            }
            _ if tokens.len() == most && window.is_none() => {
                end = format!("the model knows no more than {most} positions");
                break;
            }
            _ => generator.read(token)?,
        }
    }
    print(&stream.finish()?);
    print("\n");
    let written_s = (start.elapsed() - read).as_secs_f64();
    streams::stderr().line(&format!(
        "{} read in {:.2} s, {} generated in {written_s:.2} s: {:.1} tokens/s, {end}",
        plural(num_read, "token"),
        read.as_secs_f64(),
        plural(count, "token"),
        count as f64 / written_s.max(1e-9),
    ));
    Ok(())
}
