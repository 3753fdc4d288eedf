//! A warp: 32 threads that run in step where they stand at the same instruction.
//!
//! Threads that branched apart form groups. The group that stands first in the code runs until it reaches the next
//! one, so groups meet again after a branch. Threads wait for each other at operations of the warp (shuffles, votes)
//! and at barriers of the block. Some seeds cut a warp in two and run one half first: code that counts on threads
//! running in step without asking for it goes wrong.

use crate::fault::{Fault, FaultKind};
use crate::memory::DeviceMemory;
use crate::random::Random;

use super::arithmetic::{LANES, Register};
use super::instruction::*;
use super::shared::SharedMemory;

/// A block while it runs: the state that its warps share.
pub(super) struct BlockRun<'a> {
    pub(super) kernel: &'a PtxKernel,
    pub(super) memory: &'a mut DeviceMemory,
    pub(super) shared: SharedMemory,
    pub(super) params: &'a [u8],
    /// The block's index in the grid, for messages.
    pub(super) index: [u32; 3],
    pub(super) size: [u32; 3],
    /// The order in which the lanes of a warp carry out an atomic operation.
    pub(super) lane_order: [usize; LANES],
    /// Instructions so far, one for each thread that runs one.
    pub(super) steps: u64,
    /// More instructions than this are a fault.
    pub(super) limit: u64,
}

/// A fault of one lane, before it is known where.
pub(super) struct LaneFault {
    pub(super) lane: usize,
    pub(super) fault: Fault,
}

pub(super) type Laned<T> = Result<T, LaneFault>;

pub(super) fn on_lane(lane: usize) -> impl Fn(Fault) -> LaneFault {
    move |fault| LaneFault { lane, fault }
}

/// Threads that stand at the same instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strand {
    pub(super) pc: u32,
    pub(super) mask: u32,
}

/// Why a warp no longer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Every thread has exited.
    Done,
    Barrier,
    Turn,
}

/// Instructions until it is another warp's turn, so that a thread that waits for another warp does not wait forever.
const TURN: u64 = 200_000;

pub(super) struct Warp {
    pub(super) number: u32,
    pub(super) registers: Vec<Register>,
    /// For each predicate the lanes where it is true.
    pub(super) predicates: Vec<u32>,
    /// Local memory, lane after lane.
    pub(super) local: Vec<u8>,
    /// The lanes that have not exited.
    pub(super) live: u32,
    /// The lanes that the block has.
    pub(super) threads: u32,
    groups: Strands,
    /// Threads at a barrier.
    pub(super) waiting: Option<Strand>,
}

/// The threads of a warp that do not wait at a barrier, in groups that stand at the same instruction.
#[derive(Default)]
struct Strands {
    running: Vec<Strand>,
    /// A half that runs only when the other one cannot.
    held: Vec<Strand>,
    /// Threads at an operation of the warp whose partners have not arrived.
    parked: Vec<Strand>,
}

impl Warp {
    pub(super) fn new(kernel: &PtxKernel, number: u32, threads: u32) -> Self {
        Self {
            number,
            registers: vec![[0; LANES]; kernel.registers.count as usize],
            predicates: vec![0; kernel.registers.num_predicates as usize],
            local: vec![0; kernel.local_bytes * LANES],
            live: threads,
            threads,
            groups: Strands::default(),
            waiting: None,
        }
    }

    /// Stands all threads at the first instruction.
    pub(super) fn start(&mut self) {
        self.live = self.threads;
        self.groups.running = vec![Strand { pc: 0, mask: self.threads }];
        self.waiting = None;
    }

    /// Lets the threads continue after the barrier.
    pub(super) fn release(&mut self) {
        if let Some(group) = self.waiting.take() {
            self.groups.running.push(Strand { pc: group.pc + 1, mask: group.mask });
        }
    }

    pub(super) fn test(&self, operand: PredOperand) -> u32 {
        let lanes = self.predicates[operand.pred as usize];
        if operand.negated { !lanes } else { lanes }
    }

    /// Cuts the warp in two at random.
    pub(super) fn split(&mut self, random: &mut Random) {
        if let [group] = self.groups.running[..] {
            let half = random.next() as u32;
            self.groups.running[0].mask = group.mask & half;
            self.groups.held.push(Strand { pc: group.pc, mask: group.mask & !half });
            self.groups.running.retain(|g| g.mask != 0);
            self.groups.held.retain(|g| g.mask != 0);
        }
    }

    /// The group that stands first, and how far it may run until it meets the next one.
    fn next_group(&mut self) -> Option<(Strand, u32)> {
        if self.groups.running.is_empty() {
            std::mem::swap(&mut self.groups.running, &mut self.groups.held);
        }
        let pc = self.groups.running.iter().map(|g| g.pc).min()?;
        let mut group = Strand { pc, mask: 0 };
        let mut limit = u32::MAX;
        self.groups.running.retain(|g| {
            let here = g.pc == pc;
            if here {
                group.mask |= g.mask;
            } else {
                limit = limit.min(g.pc);
            }
            !here
        });
        Some((group, limit))
    }

    /// Runs until no thread can go on.
    pub(super) fn run(&mut self, block: &mut BlockRun) -> Result<Stop, Fault> {
        let end = block.steps + TURN;
        while let Some((group, limit)) = self.next_group() {
            if block.steps > end {
                self.groups.running.push(group);
                return Ok(Stop::Turn);
            }
            self.run_group(block, group, limit)?;
        }
        if let Some(group) = self.groups.parked.first() {
            return Err(self.absent(block, *group));
        }
        Ok(if self.waiting.is_some() { Stop::Barrier } else { Stop::Done })
    }

    fn run_group(&mut self, block: &mut BlockRun, group: Strand, limit: u32) -> Result<(), Fault> {
        let kernel = block.kernel;
        let Strand { mut pc, mut mask } = group;
        let mut count = u64::from(mask.count_ones());
        while pc < limit {
            let instruction = &kernel.code[pc as usize];
            block.steps += count;
            let active = match instruction.guard {
                Some(guard) => self.test(guard) & mask,
                None => mask,
            };
            pc += 1;
            if active == 0 {
                continue;
            }
            match &instruction.op {
                PtxOp::Branch(target) => {
                    if block.steps > block.limit {
                        return Err(self.too_long(block, pc - 1, active));
                    }
                    if active == mask && *target > pc {
                        pc = *target;
                        continue;
                    }
                    self.groups.running.push(Strand { pc: *target, mask: active });
                    self.leave(pc, mask & !active);
                    return Ok(());
                }
                PtxOp::BranchTable { index, targets } => {
                    for lane in super::arithmetic::lanes_of(active) {
                        let index = self.registers[*index as usize][lane] as u32 as usize;
                        let Some(target) = targets.get(index) else {
                            let fault = Fault::failed(format!(
                                "entry {index} of a table of {} branches",
                                targets.len()
                            ));
                            return Err(self.locate(block, pc - 1, LaneFault { lane, fault }));
                        };
                        self.groups.running.push(Strand { pc: *target, mask: 1 << lane });
                    }
                    self.leave(pc, mask & !active);
                    return Ok(());
                }
                PtxOp::Exit => {
                    self.live &= !active;
                    self.leave(pc, mask & !active);
                    return Ok(());
                }
                PtxOp::Barrier { .. } => {
                    self.arrive(block, Strand { pc: pc - 1, mask: active })?;
                    self.leave(pc, mask & !active);
                    return Ok(());
                }
                PtxOp::Warp(op, named) => {
                    let done = self.meet(block, Strand { pc: pc - 1, mask: active }, op, *named)?;
                    mask = mask & !active | done;
                    if mask == 0 {
                        return Ok(());
                    }
                    count = u64::from(mask.count_ones());
                }
                op => {
                    if let Err(fault) = self.step(block, op, active) {
                        return Err(self.locate(block, pc - 1, fault));
                    }
                }
            }
        }
        self.leave(pc, mask);
        Ok(())
    }

    fn leave(&mut self, pc: u32, mask: u32) {
        if mask != 0 {
            self.groups.running.push(Strand { pc, mask });
        }
    }

    fn arrive(&mut self, block: &BlockRun, group: Strand) -> Result<(), Fault> {
        match &mut self.waiting {
            Some(waiting) if waiting.pc != group.pc => {
                let (pc, lane) = (waiting.pc, waiting.mask.trailing_zeros());
                let line = block.kernel.code[pc as usize].line;
                let fault = Fault::failed(format!(
                    "divergent barrier: lane {lane} of this warp waits at line {line}"
                ));
                let lane = group.mask.trailing_zeros() as usize;
                return Err(self.locate(block, group.pc, LaneFault { lane, fault }));
            }
            Some(waiting) => waiting.mask |= group.mask,
            None => self.waiting = Some(group),
        }
        Ok(())
    }

    /// Runs an operation of the warp for the lanes whose partners have all arrived, and parks the others.
    fn meet(
        &mut self,
        block: &mut BlockRun,
        group: Strand,
        op: &WarpOp,
        named: Reg,
    ) -> Result<u32, Fault> {
        let mut arrived = group.mask;
        self.groups.parked.retain(|parked| {
            let here = parked.pc == group.pc;
            if here {
                arrived |= parked.mask;
            }
            !here
        });
        let (mut done, mut left) = (0, arrived);
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            let mask = self.registers[named as usize][lane] as u32;
            let fail = |message: String| LaneFault { lane, fault: Fault::failed(message) };
            if mask >> lane & 1 == 0 {
                let fault = fail(format!("the mask {mask:#x} does not name the lane itself"));
                return Err(self.locate(block, group.pc, fault));
            }
            let gone = mask & !self.live;
            if gone != 0 {
                let missing = gone.trailing_zeros();
                let why = match self.threads >> missing & 1 {
                    1 => "has exited",
                    _ => "is not in the block",
                };
                let fault = fail(format!(
                    "absent lane: the mask {mask:#x} names lane {missing}, which {why}"
                ));
                return Err(self.locate(block, group.pc, fault));
            }
            if mask & !arrived != 0 {
                // Those that stand here with other masks may still be complete.
                left &= !mask;
                continue;
            }
            let others = super::arithmetic::lanes_of(mask)
                .find(|other| self.registers[named as usize][*other] as u32 != mask);
            if let Some(other) = others {
                let fault = fail(format!("lane {other} has another mask than {mask:#x}"));
                return Err(self.locate(block, group.pc, fault));
            }
            if let Err(fault) = self.together(block, op, mask) {
                return Err(self.locate(block, group.pc, fault));
            }
            done |= mask;
            left &= !mask;
        }
        if arrived & !done != 0 {
            self.groups.parked.push(Strand { pc: group.pc, mask: arrived & !done });
        }
        Ok(done)
    }

    #[cold]
    fn absent(&self, block: &BlockRun, group: Strand) -> Fault {
        let lane = group.mask.trailing_zeros() as usize;
        let mut mask = 0;
        if let PtxOp::Warp(_, named) = block.kernel.code[group.pc as usize].op {
            mask = self.registers[named as usize][lane] as u32;
        }
        let missing = mask & !group.mask;
        let fault = Fault::failed(format!(
            "absent lanes: the mask {mask:#x} names lanes {missing:#x}, which never arrive"
        ));
        self.locate(block, group.pc, LaneFault { lane, fault })
    }

    #[cold]
    fn too_long(&self, block: &BlockRun, pc: u32, mask: u32) -> Fault {
        let message = format!("still running after {} instructions", block.limit);
        let fault = Fault { kind: FaultKind::Timeout, message };
        self.locate(block, pc, LaneFault { lane: mask.trailing_zeros() as usize, fault })
    }

    #[cold]
    pub(super) fn locate(&self, block: &BlockRun, pc: u32, fault: LaneFault) -> Fault {
        let thread = self.number * LANES as u32 + fault.lane as u32;
        let [x, y, _] = block.size;
        let (tx, ty, tz) = (thread % x, thread / x % y, thread / x / y);
        let [bx, by, bz] = block.index;
        let line = block.kernel.code[pc as usize].line;
        let text = block.kernel.lines.get(line as usize - 1).map_or("", |t| t.as_str());
        let name = &block.kernel.name;
        fault.fault.at(format!(
            "kernel {name}, block ({bx}, {by}, {bz}), thread ({tx}, {ty}, {tz}), PTX line {line} `{text}`"
        ))
    }
}
