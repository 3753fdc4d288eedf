//! `paceline tokenizer`: makes tokenizers.
//!
//! Takes texts, and writes a `tokenizer.json`. Knows no model.

pub mod args;

use paceline_data::Split;
use paceline_data::text::{TableSettings, TextError, TextFiles, Tokenizer};
use paceline_failure::outputs::{check_file, write_stated_bytes};
use paceline_failure::{Failure, Result};
use paceline_files::Printable;
use paceline_host::disk::Disk;
use paceline_host::text::{plural, say, thousands, warn};

use self::args::{TokenizerCommand, TrainTokenizerArgs};

/// Runs `paceline tokenizer`. Returns the exit code.
pub fn tokenizer(command: &TokenizerCommand) -> Result<u8> {
    match command {
        TokenizerCommand::Train(args) => train(args),
    }
}

fn train(args: &TrainTokenizerArgs) -> Result<u8> {
    let usage = |problem: String| Failure::Usage(problem);
    let in_texts = |error: TextError| usage(format!("--data-dir: {error}"));
    check_file("--to", &args.to)?;
    if args.to.exists() && !args.force {
        return Err(usage(format!(
            "--to {} is there already; pass --force to replace it, or another --to",
            args.to.printable()
        )));
    }
    let files = TextFiles::find_any(&args.data_dir).map_err(in_texts)?;
    let table = TableSettings {
        text_column: args.text_column.clone(),
        has_header: !args.no_header,
        skip_bad_rows: args.skip_bad_rows,
        ..TableSettings::default()
    };
    let files = files.of(Split::Train);
    let texts =
        files.iter().map(|file| TextFiles::running_text(file, &table, &mut |note| warn(&note)));
    let texts = texts.collect::<std::result::Result<Vec<_>, _>>().map_err(in_texts)?;
    let json = Tokenizer::train(&texts, args.vocab).map_err(|e| usage(format!("--vocab: {e}")))?;
    let tokenizer = Tokenizer::from_json(&args.to, json.clone())?;
    let count =
        |text: &String| tokenizer.encode_running_text(text, &mut |_, _| ()).map(|of| of.len());
    let counts = texts.iter().map(count).collect::<std::result::Result<Vec<_>, _>>();
    let num_tokens: usize = counts.map_err(in_texts)?.iter().sum();
    let num_bytes: usize = texts.iter().map(String::len).sum();
    write_stated_bytes(&Disk::default(), &args.to, &json)?;
    say(&format!(
        "{}: {} tokens, from {}; the texts have {} tokens of {:.2} bytes on average",
        args.to.printable(),
        thousands(tokenizer.vocab() as u64),
        plural(files.len(), "file"),
        thousands(num_tokens as u64),
        num_bytes as f64 / num_tokens.max(1) as f64
    ));
    if tokenizer.vocab() < args.vocab {
        warn(&format!(
            "--vocab {}: no more neighbors occur twice; pass --vocab {} to paceline train",
            args.vocab,
            tokenizer.vocab()
        ));
    }
    Ok(0)
}
