/*
 * A zstd decoder for one stream at a time: WebAssembly without imports and without an allocator.
 *
 * Everything lies in static memory, so an instance never grows. The page writes compressed bytes to input(), calls
 * decode(), reads what came from output(), and calls again until all input is used and no output is left.
 */
#define ZSTD_STATIC_LINKING_ONLY
#define DEBUGLEVEL 0
#define ZSTD_LEGACY_SUPPORT 0
#define ZSTD_NO_TRACE
#define ZSTD_STRIP_ERROR_STRINGS
#include <stddef.h>
#include "zstd.c"

/* All of the C library that is left. zstd asks for memory only where none was given, and it was given all. */
void *malloc(size_t size) { (void)size; return NULL; }
void *calloc(size_t count, size_t size) { (void)count; (void)size; return NULL; }
void free(void *memory) { (void)memory; }
/* Each is one instruction of WebAssembly's bulk memory operations. */
void *memcpy(void *to, const void *from, size_t size) { return __builtin_memcpy(to, from, size); }
void *memmove(void *to, const void *from, size_t size) { return __builtin_memmove(to, from, size); }
void *memset(void *to, int byte, size_t size) { return __builtin_memset(to, byte, size); }

#define EXPORT(name) __attribute__((export_name(name)))

enum {
  WINDOW_LOG = 17,                /* the gateway's streams look back 128 KiB at most */
  INPUT_BYTES = 1 << 16,
  OUTPUT_BYTES = 1 << 17,
  DICTIONARY_BYTES = 1 << 20,
  STREAM_BYTES = 704 << 10,       /* begin() checks both against what zstd says it needs */
  DIGESTED_BYTES = 32 << 10,
};

static char input_bytes[INPUT_BYTES], output_bytes[OUTPUT_BYTES], dictionary_bytes[DICTIONARY_BYTES];
static _Alignas(8) char stream_bytes[STREAM_BYTES], digested_bytes[DIGESTED_BYTES];
static ZSTD_DStream *stream;
static size_t used, hint;

EXPORT("input") char *input(void) { return input_bytes; }
EXPORT("input_size") size_t input_size(void) { return INPUT_BYTES; }
EXPORT("output") char *output(void) { return output_bytes; }
EXPORT("output_size") size_t output_size(void) { return OUTPUT_BYTES; }
EXPORT("dictionary") char *dictionary(void) { return dictionary_bytes; }
EXPORT("dictionary_size") size_t dictionary_size(void) { return DICTIONARY_BYTES; }

/* Start a stream with the first `size` bytes of dictionary(), 0 for none. 0, or a negative error code of zstd's. */
EXPORT("begin") int begin(size_t size) {
  const ZSTD_DDict *digested = NULL;
  used = 0;
  hint = 1;
  if (ZSTD_estimateDStreamSize(1 << WINDOW_LOG) > STREAM_BYTES) return -(int)ZSTD_error_memory_allocation;
  stream = ZSTD_initStaticDStream(stream_bytes, STREAM_BYTES);
  if (stream == NULL) return -(int)ZSTD_error_memory_allocation;
  size_t result = ZSTD_DCtx_setParameter(stream, ZSTD_d_windowLogMax, WINDOW_LOG);
  if (!ZSTD_isError(result) && size > 0) {
    digested = ZSTD_initStaticDDict(digested_bytes, DIGESTED_BYTES, dictionary_bytes, size, ZSTD_dlm_byRef, ZSTD_dct_auto);
    if (digested == NULL) return -(int)ZSTD_error_dictionary_corrupted;
    result = ZSTD_DCtx_refDDict(stream, digested);
  }
  return ZSTD_isError(result) ? -(int)ZSTD_getErrorCode(result) : 0;
}

/* Decode from byte `from` of the first `size` bytes of input(). Bytes in output(), or a negative error code. */
EXPORT("decode") int decode(size_t from, size_t size) {
  ZSTD_inBuffer in = {input_bytes, size, from};
  ZSTD_outBuffer out = {output_bytes, OUTPUT_BYTES, 0};
  hint = ZSTD_decompressStream(stream, &out, &in);
  used = in.pos;
  return ZSTD_isError(hint) ? -(int)ZSTD_getErrorCode(hint) : (int)out.pos;
}

/* Where the last decode() stopped in input(). */
EXPORT("used") size_t used_bytes(void) { return used; }

/* Whether the frame that began is complete and all of it was given out. */
EXPORT("complete") int complete(void) { return hint == 0; }
