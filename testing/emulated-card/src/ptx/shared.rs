//! The shared memory of a block, with the accesses of each byte since the last barrier.
//!
//! Two warps race if both touch a byte between two barriers and one of them writes. Atomic operations of several warps
//! do not race with each other. A byte that nobody wrote in this block cannot be read.

use crate::fault::Fault;

/// No warp, or one warp (its number plus one), or several of them.
type Who = u8;
const NOBODY: Who = 0;
const SEVERAL: Who = u8::MAX;

/// The accesses of a byte in this block, and since the last barrier.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Touch {
    epoch: u32,
    writer: Who,
    reader: Who,
    atomic: Who,
    written: bool,
}

impl Touch {
    /// The byte after an access by `who`, unless the access is forbidden.
    #[inline]
    fn after(mut self, epoch: u32, who: Who, access: AccessKind) -> Option<Self> {
        if self.epoch != epoch {
            self = Self { epoch, written: self.written, ..Self::default() };
        }
        let alone = |x: Who| x == NOBODY || x == who;
        let mark = |x: Who| if alone(x) { who } else { SEVERAL };
        let is_allowed = match access {
            AccessKind::Read => self.written & alone(self.writer) & alone(self.atomic),
            AccessKind::Write => alone(self.writer) & alone(self.atomic) & alone(self.reader),
            AccessKind::Atomic => self.written & alone(self.writer) & alone(self.reader),
        };
        match access {
            AccessKind::Read => self.reader = mark(self.reader),
            AccessKind::Write => (self.writer, self.written) = (who, true),
            AccessKind::Atomic => self.atomic = mark(self.atomic),
        }
        is_allowed.then_some(self)
    }

    /// Why the access at this address must not be.
    #[cold]
    fn refusal(self, who: Who, access: AccessKind, at: usize) -> Fault {
        if access != AccessKind::Write && !self.written {
            let message = format!("reads shared memory at {at:#x} that was never written");
            return Fault::failed(message);
        }
        let verb = match access {
            AccessKind::Read => "reads",
            AccessKind::Write => "writes",
            AccessKind::Atomic => "updates",
        };
        let others = match access {
            AccessKind::Read => [self.writer, self.atomic, NOBODY],
            AccessKind::Write => [self.writer, self.atomic, self.reader],
            AccessKind::Atomic => [self.writer, NOBODY, self.reader],
        };
        let other = others.into_iter().find(|x| *x != NOBODY && *x != who).unwrap_or(SEVERAL);
        let by = match other {
            SEVERAL => "other warps have".to_owned(),
            warp => format!("warp {} has", warp - 1),
        };
        let what = if self.reader == other { "read" } else { "written" };
        Fault::failed(format!(
            "race: {verb} shared memory at {at:#x}, which {by} {what} since the last barrier"
        ))
    }
}

/// The kinds of accesses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum AccessKind {
    Read,
    Write,
    /// A load and a store that nothing comes between.
    Atomic,
}

/// The shared memory of one block.
pub struct SharedMemory {
    bytes: Vec<u8>,
    touches: Vec<Touch>,
    epoch: u32,
}

impl SharedMemory {
    /// Memory of this size, uninitialized.
    pub fn new(len: usize) -> Self {
        Self { bytes: vec![0; len], touches: vec![Touch::default(); len], epoch: 1 }
    }

    /// Forgets everything, for the next block.
    pub fn reset(&mut self) {
        self.touches.fill(Touch::default());
        self.epoch = 1;
    }

    /// Later accesses do not race with earlier ones.
    pub fn barrier(&mut self) {
        self.epoch += 1;
    }

    /// The bytes of an access by a warp, once it is known to be in range and alone.
    #[inline]
    pub fn access(
        &mut self,
        warp: u32,
        address: u64,
        len: usize,
        access: AccessKind,
    ) -> Result<&mut [u8], Fault> {
        let size = self.bytes.len();
        let at = usize::try_from(address).unwrap_or(usize::MAX);
        let end = at.checked_add(len).filter(|end| *end <= size).ok_or_else(|| {
            Fault::illegal(format!(
                "access of {len} bytes at {address:#x} of {size} bytes of shared memory"
            ))
        })?;
        let who = warp as Who + 1;
        // Mostly the bytes of an access have been touched together before.
        let mut same: Option<[Touch; 2]> = None;
        for (k, touch) in self.touches[at..end].iter_mut().enumerate() {
            *touch = match same {
                Some([before, after]) if before == *touch => after,
                _ => {
                    let after = touch.after(self.epoch, who, access);
                    let after = after.ok_or_else(|| touch.refusal(who, access, at + k))?;
                    same = Some([*touch, after]);
                    after
                }
            };
        }
        Ok(&mut self.bytes[at..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn races_are_reported() {
        use AccessKind::*;
        let mut shared = SharedMemory::new(8);
        let mut run = |accesses: &[(u32, u64, AccessKind)]| {
            shared.reset();
            let mut result = Ok(());
            for (warp, at, access) in accesses {
                match *warp {
                    99 => shared.barrier(),
                    warp => result = result.and(shared.access(warp, *at, 4, *access).map(|_| ())),
                }
            }
            result.map_err(|e| e.message)
        };
        assert!(run(&[(0, 0, Write), (0, 0, Read), (1, 4, Write)]).is_ok());
        assert!(run(&[(0, 0, Write), (99, 0, Read), (1, 0, Read), (2, 0, Read)]).is_ok());
        let error = run(&[(0, 0, Write), (1, 0, Read)]).unwrap_err();
        assert!(error.contains("race: reads") && error.contains("warp 0 has written"), "{error}");
        let error = run(&[(0, 0, Write), (99, 0, Read), (0, 0, Read), (1, 0, Write)]).unwrap_err();
        assert!(error.contains("warp 0 has read"), "{error}");
        assert!(run(&[(0, 0, Read)]).unwrap_err().contains("never written"));
        assert!(run(&[(0, 6, Write)]).unwrap_err().contains("of 8 bytes"));
        // The third byte of an access has another history than the first two.
        let error = run(&[(0, 0, Write), (1, 4, Write), (0, 2, Read)]).unwrap_err();
        assert!(error.contains("0x4, which warp 1 has written"), "{error}");
        let error = run(&[(0, 0, Write), (0, 2, Read)]).unwrap_err();
        assert!(error.contains("0x4 that was never written"), "{error}");
        let begin = [(0, 0, Write), (99, 0, Read), (0, 0, Atomic), (1, 0, Atomic)];
        assert!(run(&begin).is_ok());
        assert!(run(&[&begin[..], &[(1, 0, Read)]].concat()).is_err());
    }
}
