/* Send and receive: which part of a transfer a channel carries, and its chunks.
 *
 * (Public source: src/device/sendrecv.h; ncclP2pPartBounds and ncclP2pChannelToPart in device.h;
 * u32fp8Decode in bitops.h.)
 */
#include <string.h>

#include "double.h"

/* An unsigned floating-point number of eight bits, five of them the exponent. */
static uint32_t decode_chunk_bytes(uint8_t code) {
    uint32_t exponent = code >> 3, mantissa = (code & 7u) | (exponent != 0 ? 8u : 0u);
    return mantissa << (exponent != 0 ? exponent - 1 : 0);
}

bool p2p_open(const struct ncclDevWorkP2p *work, bool send, int channel, int rank, const char *kernel,
              struct p2p_work *share, bool *copy) {
    size_t parts = send ? work->nSendChannels : work->nRecvChannels;
    size_t part = (size_t)(channel - work->channelBase) & (work->nP2pChannels - 1u);
    *copy = false;
    if (part >= parts)
        return false;
    if (send ? ncclDevWorkP2p_sendNetReg(work) || ncclDevWorkP2p_sendIpcReg(work)
             : ncclDevWorkP2p_recvNetReg(work) || ncclDevWorkP2p_recvIpcReg(work))
        double_fail("unsupported kernel %s: registered user buffers", kernel);
    size_t bytes = send ? work->sendBytes : work->recvBytes;
    size_t part_bytes = ((bytes + parts - 1) / parts + 4095) / 4096 * 4096;
    size_t begin = part * part_bytes < bytes ? part * part_bytes : bytes;
    size_t end = begin + part_bytes < bytes ? begin + part_bytes : bytes;
    share->send = send;
    share->buffer = (char *)(send ? work->sendAddr : work->recvAddr) + begin;
    share->bytes = end - begin;
    share->chunk_bytes = decode_chunk_bytes(send ? work->sendChunkSize_u32fp8 : work->recvChunkSize_u32fp8);
    if (work->sendRank == rank) {
        *copy = true;
        if (send && work->sendAddr != work->recvAddr)
            memcpy((char *)work->recvAddr + begin, share->buffer, share->bytes);
        return true;
    }
    bool low_latency = send ? ncclDevWorkP2p_sendProtoLL(work) : ncclDevWorkP2p_recvProtoLL(work);
    share->protocol = low_latency ? PROTOCOL_LL : PROTOCOL_SIMPLE;
    if (share->chunk_bytes == 0)
        double_fail("%s: a point-to-point work without chunk size", kernel);
    return true;
}

bool p2p_chunk(const struct p2p_work *share, size_t index, struct chunk *chunk) {
    size_t start = index * share->chunk_bytes;
    if (start >= share->bytes && index > 0) /* nothing at all still is one empty chunk */
        return false;
    *chunk = (struct chunk){.receive = !share->send, .send = share->send};
    chunk->count = share->bytes - start < share->chunk_bytes ? share->bytes - start : share->chunk_bytes;
    if (share->send)
        chunk->input = share->buffer + start;
    else
        chunk->output = share->buffer + start;
    return true;
}
