//! AMX, Intel's Advanced Matrix Extensions: whether a process may use its tiles, their configuration, and the peak loop.
//!
//! This file does not know what products put into the tiles. Instructions are written in assembly, since the compiler's functions
//! for them are not stable. The compiler itself uses no tiles, so their contents last from one block of assembly to the next.
//!
//! Source: Intel, "Architecture Instruction Set Extensions Programming Reference", chapter 3.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::marker::PhantomData;
use std::sync::OnceLock;

use crate::tiles::{ROW_BYTES, ROWS, Tiles};

/// Whether the processor has AMX for bf16 and the system lets this process use it. The system is asked once.
pub(crate) fn is_permitted() -> bool {
    static IS_PERMITTED: OnceLock<bool> = OnceLock::new();
    *IS_PERMITTED.get_or_init(|| has_bf16_tiles() && request_permission())
}

/// Whether the processor has AMX for bf16, and the system saves the tiles when it switches between threads.
fn has_bf16_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const OSXSAVE: u32 = 1 << 27;
    /// Tile configuration and tile data, in the register XCR0.
    const TILES: u64 = 1 << 17 | 1 << 18;

    #[target_feature(enable = "xsave")]
    fn saved_by_system() -> u64 {
        // SAFETY: register 0 exists where `xgetbv` does.
        unsafe { _xgetbv(0) }
    }
    __cpuid(0).eax >= 7
        && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE
        && __cpuid(1).ecx & OSXSAVE != 0
        // SAFETY: the processor has `xgetbv`, and the system has enabled it, as OSXSAVE says.
        && unsafe { saved_by_system() } & TILES == TILES
}

/// Asks Linux for the permission to use tile data, which all threads of the process then have
/// (Documentation/arch/x86/xstate.rst). Other systems are not asked.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const TILE_DATA: usize = 18;

    let result: usize;
    // SAFETY: the call reads and writes no memory of the process; a system call changes no registers but these.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}

/// The 64 bytes that `ldtilecfg` reads.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight tiles of full size.
static CONFIG: TileConfig = {
    let mut config = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = ROW_BYTES as u16;
        config.rows[tile] = ROWS as u8;
        tile += 1;
    }
    config
};

/// The tiles of this thread, all of full size.
pub(crate) struct Hardware(PhantomData<*mut ()>);

impl Hardware {
    /// Configures the tiles. They are zero then.
    ///
    /// # Safety
    ///
    /// [`is_permitted`] is true, and this thread has no other value of this type.
    pub(crate) unsafe fn new() -> Self {
        const { assert!(size_of::<TileConfig>() == 64) };
        // SAFETY: the caller guarantees the processor and the permission; the configuration has 64 bytes.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags));
        }
        Self(PhantomData)
    }
}

impl Drop for Hardware {
    /// Gives the tiles back: the system then has none to save when it switches to another thread.
    fn drop(&mut self) {
        // SAFETY: who made the value guarantees the processor and the permission.
        unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) };
    }
}

// SAFETY: who makes a value guarantees the processor and the permission; each instruction touches the rows that its arguments name.
unsafe impl Tiles for Hardware {
    #[inline(always)]
    unsafe fn zero<const TILE: usize>(&mut self) {
        // SAFETY: the tiles are configured.
        unsafe {
            asm!("tilezero tmm{tile}", tile = const TILE, options(nostack, nomem, preserves_flags))
        }
    }
    #[inline(always)]
    unsafe fn load<const TILE: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: the tiles are configured, and the caller guarantees the rows.
        unsafe {
            asm!(
                "tileloadd tmm{tile}, [{from} + {stride}*1]",
                tile = const TILE,
                from = in(reg) from,
                stride = in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }
    #[inline(always)]
    unsafe fn load_past_cache<const TILE: usize>(&mut self, from: *const u8, stride: usize) {
        // SAFETY: as for `load`.
        unsafe {
            asm!(
                "tileloaddt1 tmm{tile}, [{from} + {stride}*1]",
                tile = const TILE,
                from = in(reg) from,
                stride = in(reg) stride,
                options(nostack, readonly, preserves_flags),
            );
        }
    }
    #[inline(always)]
    unsafe fn store<const TILE: usize>(&mut self, to: *mut u8, stride: usize) {
        // SAFETY: as for `load`.
        unsafe {
            asm!(
                "tilestored [{to} + {stride}*1], tmm{tile}",
                tile = const TILE,
                to = in(reg) to,
                stride = in(reg) stride,
                options(nostack, preserves_flags),
            );
        }
    }
    #[inline(always)]
    unsafe fn add_products<const SUMS: usize, const A: usize, const B: usize>(&mut self) {
        // SAFETY: the tiles are configured.
        unsafe {
            asm!(
                "tdpbf16ps tmm{sums}, tmm{a}, tmm{b}",
                sums = const SUMS,
                a = const A,
                b = const B,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}

/// Floating-point operations of a product of two tiles: 16 pairs for each of 16 x 16 sums.
pub(crate) const FLOP_PER_PRODUCT: usize = 16 * 16 * 16 * 4;

/// Multiplies a tile with itself `products` times, rounded up to a multiple of 5. There are five tiles of sums, so that no
/// product waits for the one before: a product takes 52 cycles, and another may start every 16.
///
/// # Safety
///
/// [`is_permitted`] is true.
pub(crate) unsafe fn multiply_tiles(products: usize) {
    // Pairs of 0.5.
    let tile = [0x3f00_3f00_u32; ROWS * ROW_BYTES / 4];
    // SAFETY: the caller guarantees the processor and the permission; `tile` is a tile of rows that are 64 bytes apart.
    unsafe {
        let _tiles = Hardware::new();
        asm!(
            "tileloadd tmm6, [{tile} + {row}*1]",
            "tileloadd tmm7, [{tile} + {row}*1]",
            "2:",
            "tdpbf16ps tmm0, tmm6, tmm7",
            "tdpbf16ps tmm1, tmm6, tmm7",
            "tdpbf16ps tmm2, tmm6, tmm7",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "tdpbf16ps tmm4, tmm6, tmm7",
            "dec {turns}",
            "jnz 2b",
            turns = inout(reg) products.div_ceil(5).max(1) => _,
            tile = in(reg) tile.as_ptr(),
            row = in(reg) ROW_BYTES,
            options(nostack, readonly),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiles::EmulatedTiles;

    type Tile = [[u32; ROW_BYTES / 4]; ROWS];

    /// Sums of random products, after several additions.
    fn sums<T: Tiles>(tiles: &mut T) -> Tile {
        let mut state = 1_u32;
        // Numbers of both signs between 2^-8 and 2^8, as pairs.
        let mut half = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (sign, exponent, mantissa) =
                (state >> 31, 119 + (state >> 20) % 16, (state >> 8) % 128);
            sign << 15 | exponent << 7 | mantissa
        };
        let mut found = Tile::default();
        // SAFETY: all tiles lie in arrays of their size.
        unsafe {
            tiles.zero::<0>();
            for _ in 0..5 {
                let [a, b] =
                    [(); 2].map(|()| Tile::default().map(|row| row.map(|_| half() | half() << 16)));
                tiles.load::<4>(a.as_ptr().cast(), ROW_BYTES);
                tiles.load_past_cache::<6>(b.as_ptr().cast(), ROW_BYTES);
                tiles.add_products::<0, 4, 6>();
            }
            tiles.store::<0>(found.as_mut_ptr().cast(), ROW_BYTES);
        }
        found
    }

    #[test]
    fn the_processor_adds_in_the_order_that_is_stated() {
        if !is_permitted() {
            println!("left out: no AMX");
            return;
        }
        // SAFETY: AMX may be used.
        let mut tiles = unsafe { Hardware::new() };
        assert_eq!(sums(&mut tiles), sums(&mut EmulatedTiles::default()));
    }
}
