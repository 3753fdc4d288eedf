//! One event of a trace file, as written there.
//!
//! Input: the JSON of an event. Output: its fields, with times in nanoseconds and texts as bytes. The caller
//! reads the `args`. This module does not know the use of an event.

use std::io::Read;

use crate::json::{JsonError, Pull, micros_ns};

/// An event. Its buffers are reused from one event to the next.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub(crate) phase: Vec<u8>,
    pub(crate) category: Vec<u8>,
    pub(crate) name: Vec<u8>,
    pub(crate) pid: Vec<u8>,
    pub(crate) tid: Vec<u8>,
    pub(crate) ts_ns: Option<i64>,
    pub(crate) dur_ns: Option<i64>,
    /// For an arrow (flow event): its id as written, without quotes.
    pub(crate) id: Vec<u8>,
    /// `s`: the scope of an instant event.
    pub(crate) scope: Vec<u8>,
    /// Whether an arrow ends in the event around it (`bp` is `e`) instead of the next event.
    pub(crate) binds_enclosing: bool,
}

impl Event {
    /// Reads the next event and replaces the previous one. `args` reads its arguments, given the fields that
    /// come before them in the file.
    pub(crate) fn take<R: Read>(
        &mut self,
        pull: &mut Pull<R>,
        mut args: impl FnMut(&Self, &mut Pull<R>) -> Result<(), JsonError>,
    ) -> Result<(), JsonError> {
        self.clear();
        pull.begin_object()?;
        while let Some(key) = pull.next_key()? {
            let text = match key {
                b"ph" => &mut self.phase,
                b"cat" => &mut self.category,
                b"name" => &mut self.name,
                b"pid" => &mut self.pid,
                b"tid" => &mut self.tid,
                b"id" => &mut self.id,
                b"s" => &mut self.scope,
                b"ts" => {
                    self.ts_ns = pull.value()?.bytes().and_then(micros_ns);
                    continue;
                }
                b"dur" => {
                    self.dur_ns = pull.value()?.bytes().and_then(micros_ns);
                    continue;
                }
                b"bp" => {
                    self.binds_enclosing = pull.value()?.bytes() == Some(b"e");
                    continue;
                }
                b"args" => {
                    args(self, pull)?;
                    continue;
                }
                _ => {
                    pull.skip()?;
                    continue;
                }
            };
            text.clear();
            text.extend_from_slice(pull.value()?.bytes().unwrap_or_default());
        }
        Ok(())
    }

    fn clear(&mut self) {
        let Self { phase, category, name, pid, tid, id, scope, .. } = self;
        [phase, category, name, pid, tid, id, scope].into_iter().for_each(Vec::clear);
        (self.ts_ns, self.dur_ns, self.binds_enclosing) = (None, None, false);
    }

    /// Writes the key of the event's row to `row`: `pid`, a zero byte, `tid`.
    pub(crate) fn row(&self, row: &mut Vec<u8>) {
        row.clear();
        row.extend_from_slice(&self.pid);
        row.push(0);
        row.extend_from_slice(&self.tid);
    }
}
