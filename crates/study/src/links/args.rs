//! Flags of `paceline links`.

use clap::{Arg, Args};
use paceline_choices::models::MODELS;
use paceline_settings::part::{Part, Selection};

const EXAMPLES: &str = "\
Examples:
  paceline links                                      what links deliver
  paceline links --params 11e6,25.6e6 --compute-ms 50 --nproc 8    what models would spend
  paceline links --model cnn --channels 32 64 --link 1gbe --measure
  paceline links --cnn 16,32:128 --cnn 32,64,128:512 --cnn 64,128,256:2048
";

/// The flags by which models are sized.
#[derive(Clone, Copy, Debug)]
pub struct Sizes;

impl Selection for Sizes {
    fn flags() -> Vec<Arg> {
        MODELS.flags()
    }
}

/// Flags of `paceline links`.
#[derive(Debug, Args)]
#[command(before_help = EXAMPLES, allow_negative_numbers = true)]
pub struct LinksArgs {
    /// Numbers of parameters, separated by commas, for which to compute the time spent on communication
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = num_params,
        conflicts_with = "model"
    )]
    pub params: Vec<f64>,
    /// The same for this model, with its true number of parameters
    #[arg(long, value_parser = MODELS.parser())]
    pub model: Option<String>,
    /// The same for a CNN with these channels and this hidden layer, as 16,32:128; repeatable
    #[arg(
        long,
        value_name = "C,C:N",
        value_parser = cnn,
        conflicts_with_all = ["params", "model"]
    )]
    pub cnn: Vec<CnnSizes>,
    /// Sizes of the model.
    #[command(flatten)]
    pub sizes: Part<Sizes>,
    /// The link
    #[arg(long, value_name = "LINK", default_value = "10gbit,50us")]
    pub link: String,
    /// Ranks that add up their gradients
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub nproc: usize,
    /// How the ranks all-reduce: direct, ring, or auto, which takes the one that the cost model finds faster
    #[arg(long, value_name = "NAME", default_value = "direct")]
    pub algorithm: String,
    /// Computing time of a step in milliseconds [default: measured, with --model]
    #[arg(long, value_name = "MS")]
    pub compute_ms: Option<f64>,
    /// Also all-reduce as many bytes on the emulated link, and print the measured time
    #[arg(long)]
    pub measure: bool,
}

/// The sizes of a CNN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CnnSizes {
    /// Output channels of each convolution.
    pub channels: Vec<u64>,
    /// Width of the hidden layer.
    pub hidden: u64,
}

/// Reads `16,32:128`, or the same with spaces between the channels, as `--channels` has them.
fn cnn(text: &str) -> Result<CnnSizes, String> {
    let number = |text: &str| text.parse().ok().filter(|size| (1..=1 << 20).contains(size));
    let parsed = text.split_once(':').and_then(|(channels, hidden)| {
        let words = channels.split([',', ' ']).filter(|word| !word.is_empty());
        let channels = words.map(number).collect::<Option<Vec<u64>>>()?;
        Some(CnnSizes { channels, hidden: number(hidden.trim())? })
    });
    parsed
        .filter(|sizes| !sizes.channels.is_empty())
        .ok_or_else(|| "give channels and the hidden layer, such as 16,32:128".to_owned())
}

/// Reads a number of parameters, which may be written with a power of ten.
fn num_params(text: &str) -> Result<f64, String> {
    text.trim().parse().map_err(|_| "give a number such as 11e6 or 25600000".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cnn_is_channels_and_a_hidden_layer() {
        let sizes = CnnSizes { channels: vec![16, 32], hidden: 128 };
        for text in ["16,32:128", "16 32:128", "16, 32 : 128"] {
            assert_eq!(cnn(text).as_ref(), Ok(&sizes), "{text}");
        }
        for bad in ["", "16,32", ":128", "16:", "16,x:8", "0:8", "8:0", "-4:8", "4:2000000"] {
            assert!(cnn(bad).unwrap_err().contains("such as 16,32:128"), "{bad}");
        }
    }
}
