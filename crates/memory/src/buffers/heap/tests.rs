//! Where blocks lie, and which memory goes back to the system.

use super::*;

/// Numbers that look random, the same in each run.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % limit
    }
}

fn fill(block: &Block, value: u8) {
    // SAFETY: the block is in use by this test only.
    unsafe { block.base.write_bytes(value, block.len_bytes) };
}

fn is_filled(block: &Block, value: u8) -> bool {
    // SAFETY: the block is in use by this test only, which has filled it.
    let bytes = unsafe { std::slice::from_raw_parts(block.base.as_ptr(), block.len_bytes) };
    bytes.iter().all(|&byte| byte == value)
}

/// Compares the heap's counters with its chunks.
fn check(heap: &Heap) {
    let mut reserved = 0;
    let mut gaps = 0;
    for chunk in heap.chunks.values() {
        let ranges: Vec<_> = chunk.gaps.iter().map(|(&start, &len)| start..start + len).collect();
        assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{chunk:?}");
        assert!(ranges.iter().all(|gap| !gap.is_empty() && gap.end <= chunk.end), "{chunk:?}");
        let absent: Vec<_> = chunk.absent.iter().map(|(&start, &end)| start..end).collect();
        for absent in &absent {
            assert!(ranges.iter().any(|gap| gap.start <= absent.start && absent.end <= gap.end));
        }
        assert!(absent.windows(2).all(|pair| pair[0].end <= pair[1].start), "{chunk:?}");
        let end = chunk.end;
        assert!(!matches!(chunk.mapping, Mapped::System(..)) || end <= chunk.writable, "{chunk:?}");
        reserved += end - absent.iter().map(Range::len).sum::<usize>();
        gaps += ranges.iter().map(Range::len).sum::<usize>();
    }
    let ends: usize = heap.chunks.values().map(|chunk| chunk.end).sum();
    assert_eq!((heap.usage.reserved_bytes, heap.usage.in_use_bytes), (reserved, ends - gaps));
}

#[test]
fn blocks_in_any_order_keep_their_contents_and_the_bound_holds() {
    for seed in 0..8 {
        let mut chance = Chance(seed);
        let mut heap = Heap::default();
        let mut blocks: Vec<(Block, u8)> = Vec::new();
        for round in 0..600 {
            // Phases with many small blocks, with few large ones, and of giving back.
            let largest = [3000, 200_000, 3_000_000][round / 60 % 3];
            let gives_back = chance.below(10) < if round / 40 % 2 == 0 { 3 } else { 7 };
            if gives_back && !blocks.is_empty() {
                let (block, value) = blocks.swap_remove(chance.below(blocks.len()));
                assert!(is_filled(&block, value), "seed {seed}, round {round}");
                heap.give_back(block);
            } else if blocks.len() < 60 {
                let block = heap.take(1 + chance.below(largest)).unwrap();
                assert!(block.base.addr().get().is_multiple_of(ALIGNMENT));
                let value = (round % 251) as u8;
                fill(&block, value);
                blocks.push((block, value));
            }
            check(&heap);
            // Up to a grain stays on either side of each block.
            let rest = 2 * GRAIN * (blocks.len() + 1);
            assert!(
                heap.usage.reserved_bytes <= bound_bytes(heap.usage.peak_bytes) + rest,
                "{heap:?}"
            );
        }
        assert!(blocks.iter().all(|(block, value)| is_filled(block, *value)), "seed {seed}");
        blocks.into_iter().for_each(|(block, _)| heap.give_back(block));
        heap.trim(usize::MAX);
        check(&heap);
        assert_eq!(heap.usage.reserved_bytes, 0, "{heap:?}");
    }
}

/// The addresses depend on the blocks in use, and not on earlier ones.
#[test]
fn a_step_takes_the_same_places_after_any_other() {
    let step = |heap: &mut Heap, unit: usize| {
        let kept: Vec<Block> = (1..9).map(|n| heap.take(n * unit).unwrap()).collect();
        let places: Vec<usize> = kept.iter().map(|block| block.start).collect();
        kept.into_iter().rev().for_each(|block| heap.give_back(block));
        places
    };
    let (mut first, mut second) = (Heap::default(), Heap::default());
    let large = step(&mut first, 100_000);
    let after_large = first.usage.num_requests;
    for unit in [7, 30_000, 99_999, 500] {
        assert_eq!(step(&mut first, unit), step(&mut second, unit));
    }
    assert_eq!(first.usage.num_requests, after_large);
    assert_eq!(step(&mut second, 100_000), large);
    assert_eq!(first.usage.reserved_bytes, second.usage.reserved_bytes);
}

#[test]
fn free_memory_goes_back_before_an_allocation_fails() {
    const PIECE: usize = 1 << 20;
    let mut heap = Heap::new(Device::Cpu, Shortage::AboveBytes(8 * PIECE), None);
    let blocks: Vec<Block> = (0..8).map(|_| heap.take(PIECE).unwrap()).collect();
    blocks.iter().for_each(|block| fill(block, 1));
    assert!(heap.take(64).is_none());
    check(&heap);
    // Every other block is free: half of the memory, and no gap has room for two.
    blocks.iter().step_by(2).for_each(|block| heap.give_back(*block));
    let large = heap.take(4 * PIECE).unwrap();
    fill(&large, 2);
    check(&heap);
    assert_eq!(heap.usage.reserved_bytes, 8 * PIECE);
    assert!(heap.take(PIECE).is_none());
    // The refused request leaves no trace.
    check(&heap);
    assert!(blocks.iter().skip(1).step_by(2).all(|block| is_filled(block, 1)));
    assert!(is_filled(&large, 2));
    heap.give_back(large);
    heap.take(4 * PIECE).unwrap();
}

#[test]
fn memory_beyond_the_bound_goes_back() {
    let mut heap = Heap::default();
    // A gap after a block that stays, and then a block that is too large for it.
    for len in [1 << 20, 2 << 20, 3 << 20, 4 << 20] {
        let [gap, stays] = [len, 64].map(|len| heap.take(len).unwrap());
        heap.give_back(gap);
        check(&heap);
        assert!(
            heap.usage.reserved_bytes <= bound_bytes(heap.usage.peak_bytes) + 2 * GRAIN,
            "{heap:?}"
        );
        assert_eq!(stays.len_bytes, 64);
    }
}
