//! The speed of convolutions on a card: `cargo run --release -p paceline-kernels --example card_convolutions`.
//!
//! Prints for each layer of a small network, with its ReLU and 2x2 max-pool, what its output, the gradient of its weight (with
//! that of its bias) and the gradient of its input take: the median by the card's events, and the rate of the
//! multiplications and additions of the convolution. An argument is the number of images.

use half::bf16;
use paceline_cuda::{Card, Event};
use paceline_kernels::conv2d::Conv2d;
use paceline_kernels::{Compute, conv_relu_pool};
use paceline_memory::{Accelerator, Allocator, Category, DType, Tensor};

/// Channels of the images, and of each layer's output.
const CHANNELS: [usize; 4] = [3, 64, 128, 256];
/// Rows, and columns, of the images.
const SIDE: usize = 32;
/// Runs of an operation that are not timed, and those that are.
const WARM_UP: usize = 5;
const RUNS: usize = 20;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let batch = std::env::args().nth(1).map_or(Ok(512), |text| text.parse())?;
    let card = Card::open(0).map_err(|error| format!("there is no card to measure: {error}"))?;
    println!("{}, {batch} images; us, TFLOP/s", card.name());
    let stream = Accelerator::cuda(card.clone()).stream("compute")?;
    let on = Compute::new(1, Allocator::on(&stream))?;
    let rounded = Compute::new(1, Allocator::on(&stream))?.with_tf32();
    let [exact, rounded] = [on, rounded].map(|on| Timer { card: card.clone(), on });
    let cases = [
        ("f32", &exact, DType::F32),
        ("tf32", &rounded, DType::F32),
        ("bf16", &exact, DType::BF16),
    ];
    for (name, timer, dtype) in cases {
        let mut total = 0.0;
        for layer in 0..CHANNELS.len() - 1 {
            let side = SIDE >> layer;
            let conv = Conv2d::same3x3(side, side, CHANNELS[layer], CHANNELS[layer + 1]);
            total += timer.time_layer(name, &conv, dtype, layer, batch)?;
        }
        println!("{name}: {total:.0} us in all\n");
    }
    Ok(())
}

struct Timer {
    card: Card,
    on: Compute,
}

impl Timer {
    /// The microseconds of a layer's operations.
    fn time_layer(
        &self,
        case: &str,
        conv: &Conv2d,
        dtype: DType,
        layer: usize,
        batch: usize,
    ) -> Result<f64, Failure> {
        // Images are f32, whatever layers compute in.
        let input = if layer == 0 { DType::F32 } else { dtype };
        let pooled = conv_relu_pool::output_shape(conv, batch);
        let x = self.random(input, &conv.input_shape(batch))?;
        let (w, bias) = (
            self.random(DType::F32, &conv.weight_shape())?,
            self.random(DType::F32, &[conv.c_out])?,
        );
        let (y, dy) = (self.random(dtype, &pooled)?, self.random(dtype, &pooled)?);
        let winners = self.on.allocator.tensor(DType::U8, &pooled[..], Category::Data)?;
        let (dw, db) = (
            self.random(DType::F32, &conv.weight_shape())?,
            self.random(DType::F32, &[conv.c_out])?,
        );
        let dx = self.random(input, &conv.input_shape(batch))?;
        let on = &self.on;
        let forward = || conv_relu_pool::forward(on, conv, &x, &w, &bias, &y, &winners);
        let weight =
            || conv_relu_pool::backward_weight(on, conv, &x, &winners, &dy, &dw, &db, false);
        let gradient = || conv_relu_pool::backward_input(on, conv, &w, &winners, &dy, &dx);
        let mut operations: Vec<(&str, &dyn Fn() -> paceline_kernels::Result<()>)> =
            vec![("forward", &forward), ("backward weight", &weight)];
        if layer > 0 {
            operations.push(("backward input", &gradient));
        }
        let products = batch * conv.out_height() * conv.out_width() * 9 * conv.c_in * conv.c_out;
        let mut total = 0.0;
        for (name, operation) in operations {
            let us = self.time(operation)?;
            let rate = 2.0 * products as f64 / us / 1e6;
            println!("{case:5} layer {} {name:16}{us:9.1}{rate:9.1}", layer + 1);
            total += us;
        }
        Ok(total)
    }

    /// The median of the microseconds of an operation.
    fn time(&self, operation: &dyn Fn() -> paceline_kernels::Result<()>) -> Result<f64, Failure> {
        let stream = self.on.allocator.home().and_then(|stream| stream.card());
        let stream = stream.ok_or("the memory is not that of a card")?;
        for _ in 0..WARM_UP {
            operation()?;
        }
        let mut events = Vec::new();
        for _ in 0..RUNS {
            let (begin, end) = (Event::new(&self.card)?, Event::new(&self.card)?);
            stream.record(&begin)?;
            operation()?;
            stream.record(&end)?;
            events.push((begin, end));
        }
        stream.synchronize()?;
        let ns: Result<Vec<u64>, _> =
            events.iter().map(|(begin, end)| end.ns_since(begin)).collect();
        let mut ns = ns?;
        ns.sort_unstable();
        Ok(ns[RUNS / 2] as f64 / 1e3)
    }

    /// Pseudorandom numbers from -0.5 to 0.5.
    fn random(&self, dtype: DType, shape: &[usize]) -> Result<Tensor, Failure> {
        let host = self.on.host.tensor(dtype, shape, Category::Data)?;
        let mut state = 1u32;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as f32 / u32::MAX as f32 - 0.5
        };
        match dtype {
            DType::BF16 => {
                host.write::<bf16>()?.iter_mut().for_each(|to| *to = bf16::from_f32(next()));
            }
            _ => host.write::<f32>()?.iter_mut().for_each(|to| *to = next()),
        }
        let tensor = self.on.allocator.tensor(dtype, shape, Category::Data)?;
        self.on.copy(&host, &tensor)?;
        // The copy reads the host's memory until it is done.
        self.on.synchronize()?;
        Ok(tensor)
    }
}
