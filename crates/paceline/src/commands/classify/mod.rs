//! `paceline classify`: the classes into which a trained model puts texts.
//!
//! Takes a folder with a classifier, and texts: words of the command line, the rows of a table, or lines. Prints a line for each
//! text of the command line; for others a CSV with a row for each, as they come. Holds a few texts at a time.

pub mod args;

use std::io::{self, IsTerminal};

use paceline_checkpoint::command::Carried;
use paceline_data::text::{TableSettings, TextError, each_text};
use paceline_failure::{Failure, Result, usage};
use paceline_files::Printable;
use paceline_host::streams;
use paceline_host::text::say;
use paceline_kernels::Compute;
use paceline_memory::{Allocator, Category, DType};
use paceline_model::{Batch, LlamaConfig, Storage};
use paceline_run::predictions::likeliest;
use paceline_table::table::{csv_lines, csv_text};

use self::args::ClassifyArgs;
use super::folder::Folder;

/// Texts that are tokenized at once.
const CHUNK: usize = 32;

/// Runs `paceline classify`: checks the flags and the folder, then answers. `carried` gives the tokenizer of a data set that
/// the program carries.
pub fn classify(args: &ClassifyArgs, carried: Carried) -> Result<u8> {
    if args.texts.is_empty() && args.file.is_none() && io::stdin().is_terminal() {
        return usage("there is no text; pass one, or --file FILE, or pipe texts in, one a line");
    }
    let folder = Folder::open(&args.folder, true, carried)?;
    let (vocab, known) = (folder.tokenizer.vocab(), folder.config.vocab_size);
    if vocab > known {
        return usage(format!(
            "--model {}: tokenizer.json has {vocab} tokens, and by config.json the model has {known}; use the tokenizer.json of \
             this model",
            args.folder.printable()
        ));
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let compute = Compute::new(threads, Allocator::new())?;
    let storage = folder.load(DType::F32, &compute)?;
    if args.texts.is_empty() {
        print_rows(args, &folder.class_names, |texts| answers(texts, &folder, &storage, &compute))?;
        return Ok(0);
    }
    for (_, probabilities) in answers(&args.texts, &folder, &storage, &compute)? {
        let mut all: Vec<_> = folder.class_names.iter().zip(probabilities).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(if args.all { all.len() } else { 1 });
        let words = all.iter().map(|(name, part)| format!("{name} {:.2} %", 100.0 * part));
        say(&words.collect::<Vec<_>>().join(", "));
    }
    Ok(0)
}

/// The likeliest class of a text, and the probabilities of all classes.
type Answer = (usize, Vec<f64>);

/// The answers to texts, in their order. Each text is read alone, so that its answer depends on no other.
fn answers(
    texts: &[String],
    folder: &Folder,
    storage: &Storage,
    compute: &Compute,
) -> Result<Vec<Answer>> {
    let (tokenizer, memory) = (&folder.tokenizer, &compute.allocator);
    let most = folder.config.max_position_embeddings;
    let max_length = folder.trained_len.map_or(most, |len| len.min(most));
    let tokens = tokenizer.encode(texts, max_length, &mut |_, _| {});
    let tokens = tokens.map_err(|error| Failure::Usage(error.to_string()))?;
    let answer = |mut tokens: Vec<u32>| {
        if tokens.is_empty() {
            // As in training, a text without tokens is one of padding.
            tokens.push(tokenizer.pad());
        }
        let inputs = memory.tensor(DType::I64, [1, tokens.len()], Category::Data)?;
        let mut places = inputs.write::<i64>()?;
        places.iter_mut().zip(&tokens).for_each(|(to, token)| *to = i64::from(*token));
        drop(places);
        let lengths = memory.tensor(DType::I64, [1], Category::Data)?;
        lengths.write::<i64>()?[0] = tokens.len() as i64;
        let batch = Batch::of(vec![(Batch::INPUTS, inputs), (Batch::LENGTHS, lengths)]);
        let config = LlamaConfig { max_position_embeddings: tokens.len(), ..folder.config.clone() };
        let logits = config.build(1)?.classify(compute, storage, &batch)?;
        let found = logits.map(|logits| likeliest(&logits)).transpose()?.unwrap_or_default();
        let finite = found.into_iter().find(|(class, all)| all[*class].is_finite());
        finite.ok_or_else(|| {
            Failure::Run("--model: its outputs are not finite; pass an earlier checkpoint".into())
        })
    };
    tokens.into_iter().map(answer).collect()
}

/// Prints a row of CSV for each text of the file or of standard input, below a header. `classes` are their names.
fn print_rows(
    args: &ClassifyArgs,
    classes: &[String],
    answers: impl Fn(&[String]) -> Result<Vec<Answer>>,
) -> Result<()> {
    let names = classes.iter().filter(|_| args.all).map(|name| csv_text(name));
    let head = ["class", "probability"].map(str::to_owned).into_iter().chain(names);
    // Nothing is printed before a text has been read.
    let mut rows = vec![head.collect::<Vec<_>>()];
    let mut print = |texts: &mut Vec<String>| {
        rows.extend(answers(texts)?.into_iter().map(|(class, all)| {
            let others = all.iter().filter(|_| args.all);
            let parts = [&all[class]].into_iter().chain(others).map(|part| format!("{part:.6}"));
            std::iter::once(csv_text(&classes[class])).chain(parts).collect()
        }));
        texts.clear();
        streams::stdout().part(&csv_lines(rows.drain(..)));
        Ok(())
    };
    let table = TableSettings {
        text_column: args.text_column.clone(),
        label_column: None,
        has_header: !args.no_header,
        ..TableSettings::default()
    };
    let (mut waiting, mut outcome) = (Vec::new(), Ok(()));
    let read = each_text(args.file.as_deref(), &table, |text| {
        waiting.push(text);
        if waiting.len() == CHUNK {
            outcome = print(&mut waiting);
        }
        outcome.is_ok() && !streams::stdout().has_failed()
    });
    outcome?;
    read.map_err(|error| {
        let is_column = matches!(error, TextError::Column { .. });
        let fix = if is_column {
            "; name the column with --text-column, or pass --no-header"
        } else {
            ""
        };
        let flag = args.file.as_ref().map_or("", |_| "--file ");
        Failure::Usage(format!("{flag}{error}{fix}"))
    })?;
    print(&mut waiting)
}
