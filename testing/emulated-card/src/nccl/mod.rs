//! The functions of NCCL (`libnccl.so.2`) that paceline uses, between processes of one machine.
//!
//! Input: calls of every rank. Output: collectives that run as work of a stream and wait for the other ranks without
//! blocking the driver. Ranks exchange messages through files in shared memory (`/dev/shm`). A message says which call
//! it belongs to, so ranks that make different calls get an error, where NCCL would hang. Sums have an order of their
//! own, which nothing promises. Calls of one communicator must be issued on one stream: NCCL itself would order
//! several streams by the time of their calls, and this module does not.

mod api;
mod collective;
mod communicator;
mod reduce;
