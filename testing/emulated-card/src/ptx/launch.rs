//! A launch: the blocks of a grid, one after the other, and the warps of a block in turns.
//!
//! Input: a kernel, its parameters, sizes, and a seed from which every free choice of order is drawn. Output: the
//! number of instructions, or the first fault. This module knows nothing of streams.

use std::sync::Arc;

use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::random::Random;

use super::arithmetic::LANES;
use super::instruction::*;
use super::shared::SharedMemory;
use super::warp::{BlockRun, LaneFault, Stop, Warp};

/// Everything that a kernel runs with.
#[derive(Clone, Debug)]
pub struct PtxLaunch {
    /// The kernel.
    pub kernel: Arc<PtxKernel>,
    /// Its parameters' memory.
    pub params: Vec<u8>,
    /// The number of blocks.
    pub grid: [u32; 3],
    /// The number of threads of a block.
    pub block: [u32; 3],
    /// Shared memory beside the kernel's own.
    pub dynamic_shared_bytes: usize,
    /// The addresses of the module's variables.
    pub variables: Arc<[u64]>,
}

impl PtxLaunch {
    /// Runs the kernel and returns how many instructions its threads ran; more than `limit` are a fault. `seed` decides every
    /// order that a card leaves open; 0 is the plain order.
    pub fn run(&self, memory: &mut DeviceMemory, seed: u64, limit: u64) -> Result<u64, Fault> {
        let kernel = &*self.kernel;
        let mut random = (seed != 0).then(|| Random::new(seed));
        let mut blocks: Vec<u32> = (0..self.grid.iter().product()).collect();
        let mut lane_order: [usize; LANES] = std::array::from_fn(|lane| lane);
        if let Some(random) = &mut random {
            random.shuffle(&mut blocks);
            random.shuffle(&mut lane_order);
        }
        let shared_start = kernel.shared_bytes.next_multiple_of(16);
        // Without dynamic memory the padding in front of it does not belong to the kernel.
        let shared_bytes = match self.dynamic_shared_bytes {
            0 => kernel.shared_bytes,
            dynamic => shared_start + dynamic,
        };
        let mut block = BlockRun {
            kernel,
            memory,
            shared: SharedMemory::new(shared_bytes),
            params: &self.params,
            index: [0; 3],
            size: self.block,
            lane_order,
            steps: 0,
            limit,
        };
        let mut warps = self.warps(shared_start as u64);
        for index in blocks {
            let [x, y, _] = self.grid;
            block.index = [index % x, index / x % y, index / x / y];
            for warp in &mut warps {
                warp.start();
                for (register, special) in &kernel.registers.specials {
                    if let Special::Block(axis) = special {
                        warp.registers[*register as usize] = [u64::from(block.index[*axis]); LANES];
                    }
                }
            }
            run_block(&mut block, &mut warps, &mut random)?;
            block.shared.reset();
        }
        Ok(block.steps)
    }

    /// The warps of a block with the registers that stay the same for all blocks.
    fn warps(&self, shared_start: u64) -> Vec<Warp> {
        let threads = self.block.iter().product::<u32>();
        let warps = (0..threads.div_ceil(LANES as u32)).map(|number| {
            let count = (threads - number * LANES as u32).min(LANES as u32);
            let mut warp = Warp::new(&self.kernel, number, u32::MAX >> (LANES as u32 - count));
            for (register, constant) in &self.kernel.registers.constants {
                let value = match constant {
                    Constant::Value(value) => *value,
                    Constant::Variable(index) => self.variables[*index],
                    Constant::DynamicShared => shared_start,
                };
                warp.registers[*register as usize] = [value; LANES];
            }
            for (register, special) in &self.kernel.registers.specials {
                warp.registers[*register as usize] =
                    std::array::from_fn(|lane| self.special(*special, number, lane as u32));
            }
            warp
        });
        warps.collect()
    }

    fn special(&self, special: Special, warp: u32, lane: u32) -> u64 {
        let thread = warp * LANES as u32 + lane;
        let [x, y, _] = self.block;
        let below = (1u32 << lane) - 1;
        u64::from(match special {
            Special::Thread(axis) => [thread % x, thread / x % y, thread / x / y][axis],
            Special::BlockSize(axis) => self.block[axis],
            Special::GridSize(axis) => self.grid[axis],
            Special::Block(_) => 0,
            Special::Lane => lane,
            Special::Warp => warp,
            Special::LaneMask(LaneMask::Equal) => 1 << lane,
            Special::LaneMask(LaneMask::Less) => below,
            Special::LaneMask(LaneMask::LessEqual) => below | 1 << lane,
            Special::LaneMask(LaneMask::Greater) => !(below | 1 << lane),
            Special::LaneMask(LaneMask::GreaterEqual) => !below,
        })
    }
}

/// Runs the warps of a block, in turns. Without random numbers, always the first one that can go on.
fn run_block(
    block: &mut BlockRun,
    warps: &mut [Warp],
    random: &mut Option<Random>,
) -> Result<(), Fault> {
    let mut order: Vec<usize> = (0..warps.len()).collect();
    loop {
        // Every warp runs until it cannot go on.
        let mut ready = order.clone();
        while !ready.is_empty() {
            let next = random.as_mut().map_or(0, |random| random.below(ready.len()));
            let warp = &mut warps[ready[next]];
            if let Some(random) = random
                && random.below(4) == 0
            {
                warp.split(random);
            }
            match warp.run(block)? {
                Stop::Turn => ready.rotate_left(1),
                Stop::Barrier | Stop::Done => _ = ready.remove(next),
            }
        }
        order.retain(|k| warps[*k].waiting.is_some());
        if order.is_empty() {
            return Ok(());
        }
        release(block, warps)?;
    }
}

/// Opens the barrier if every thread of the block stands at it.
fn release(block: &mut BlockRun, warps: &mut [Warp]) -> Result<(), Fault> {
    let Some((first, group)) = warps.iter().find_map(|w| w.waiting.map(|g| (w, g))) else {
        return Ok(());
    };
    let lane = group.mask.trailing_zeros() as usize;
    for warp in warps.iter() {
        let (pc, mask) = warp.waiting.map_or((group.pc, 0), |g| (g.pc, g.mask));
        let missing = warp.threads & !mask;
        if missing == 0 && pc == group.pc {
            continue;
        }
        let thread = warp.number * LANES as u32;
        let message = if missing != 0 {
            let thread = thread + missing.trailing_zeros();
            format!("divergent barrier: thread {thread} of the block exited without it")
        } else {
            let line = block.kernel.code[pc as usize].line;
            format!("divergent barrier: thread {thread} of the block waits at line {line}")
        };
        let fault = LaneFault { lane, fault: Fault::failed(message) };
        return Err(first.locate(block, group.pc, fault));
    }
    if let PtxOp::Barrier { result, .. } = block.kernel.code[group.pc as usize].op {
        share_result(warps, result);
    }
    block.shared.barrier();
    for warp in warps {
        warp.release();
    }
    Ok(())
}

/// Gives every thread the result of `bar.red`.
fn share_result(warps: &mut [Warp], result: BarrierResult) {
    let (BarrierResult::Pred(_, _, from) | BarrierResult::Count(_, from)) = result else {
        return;
    };
    let threads: u32 = warps.iter().map(|w| w.threads.count_ones()).sum();
    let count: u32 = warps.iter().map(|w| (w.test(from) & w.threads).count_ones()).sum();
    for warp in warps {
        match result {
            BarrierResult::Count(to, _) => warp.registers[to as usize] = [u64::from(count); LANES],
            BarrierResult::Pred(vote, to, _) => {
                let holds = if vote == Vote::All { count == threads } else { count > 0 };
                warp.set_pred(to, if holds { u32::MAX } else { 0 }, warp.threads);
            }
            BarrierResult::None => {}
        }
    }
}
